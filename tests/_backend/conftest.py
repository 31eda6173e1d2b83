"""What several tests of Triton's kernels need."""

import pytest


@pytest.fixture
def verdicts(monkeypatch):
    """The verdicts of a process that has tried nothing."""
    from keras_lso._backend.torch.triton import trial

    found = {}
    monkeypatch.setattr(trial, "_verdicts", found)
    return found


@pytest.fixture
def rounding_of_a_gpu(monkeypatch):
    """Lets Triton's interpreter round to bfloat16 as a GPU does.

    By itself it cuts the digits off. `test_triton_compiled.py` shows that a GPU is told
    to round to the nearest.
    """
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    own = InterpreterBuilder.cast_impl

    def cast(self, source, dtype):
        pair = source.dtype.scalar, dtype.scalar
        if set(pair) != {tl.float32, tl.bfloat16}:
            return own(self, source, dtype)
        if pair[0] == tl.float32:
            values = torch.tensor(source.data).bfloat16().view(torch.uint16)
        else:
            values = torch.tensor(source.data).view(torch.bfloat16).float()
        return TensorHandle(values.numpy(), dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
