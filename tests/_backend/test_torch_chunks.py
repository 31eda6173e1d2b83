"""Which tensors PyTorch updates together on the host, and where it unscales them."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso

if keras.backend.backend() != "torch":
    pytest.skip("The other backends compile a step", allow_module_level=True)

import torch

from keras_lso._backend.torch import update as torch_update

LARGE, SMALL = [(300, 300), (200, 200)], [(3,), (50, 40), (5,)]


@pytest.fixture
def calls(monkeypatch):
    """The gradients that each call of Adam's kernel gets."""
    recorded, kernel = [], torch._fused_adam_

    def record(variables, grads, *args, **kwargs):
        recorded.append(list(grads))
        return kernel(variables, grads, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adam_", record)
    return recorded


class Training:
    """Steps of Adam, each by new gradients."""

    def __init__(self, shapes):
        self.random, self.shapes = np.random.default_rng(0), shapes
        self.optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.Adam())
        self.variables = [keras.Variable(np.ones(s, "float32")) for s in shapes]
        self.optimizer.build(self.variables)

    def step(self, dtype="float32"):
        values = [self.random.normal(size=s) for s in self.shapes]
        grads = [ops.convert_to_tensor(v, dtype) for v in values]
        self.optimizer.apply(grads, self.variables)


def test_large_tensors_form_separate_chunks_and_small_tensors_share_chunk(calls):
    first, second, third = SMALL
    Training([first, LARGE[0], second, LARGE[1], third]).step()
    shapes = [[tuple(g.shape) for g in grads] for grads in calls]
    assert sorted(map(len, shapes)) == [1, 1, 3]
    assert SMALL in shapes
    assert [LARGE[0]] in shapes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unscaled_large_gradients_share_memory_midpoint(calls, dtype):
    # The thread that has the first half of one has the first half of the other.
    Training(LARGE).step(dtype)
    middles = [g.data_ptr() + g.nbytes // 2 for (g,) in calls]
    assert len(middles) == 2
    assert abs(middles[0] - middles[1]) <= 128  # bytes of a line


def test_kept_memory_is_writable_after_step_in_inference_mode(calls):
    training = Training(LARGE[:1])
    with torch.inference_mode():
        training.step()
    training.step()
    (first,), (second,) = calls
    assert not first.is_inference() and not second.is_inference()


@pytest.mark.parametrize("is_kept", [True, False])
def test_unscaled_gradient_memory_is_kept_up_to_size_limit(calls, monkeypatch, is_kept):
    size = np.prod(LARGE[0])
    monkeypatch.setattr(torch_update, "_REUSED_MEMORY", size if is_kept else size - 1)
    training = Training(LARGE[:1])
    training.step()
    training.step()
    # `calls` holds the first, so its place is not given to the second.
    (first,), (second,) = calls
    assert (first.data_ptr() == second.data_ptr()) == is_kept


def test_step_on_host_tensors_ignores_default_device():
    steps = []
    for device in ("cpu", "meta"):
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.RMSprop(0.5))
        optimizer.build([variable])
        gradient = torch.tensor([1.0, -2.0, 4.0])
        with torch.device(device):
            optimizer.apply([gradient], [variable], scaled=True)
        steps.append(variable.value.detach().clone())
    assert torch.equal(*steps)
