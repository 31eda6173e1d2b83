"""The formulas of masters, compiled by Inductor."""

import shutil
import warnings

import keras
import numpy as np
import pytest

import keras_lso

if keras.backend.backend() != "torch":
    pytest.skip("Only PyTorch compiles them", allow_module_level=True)

import torch  # noqa: E402

from keras_lso._backend.torch import compiled  # noqa: E402

SHAPES = (300, 7), (2**18 + 3,), (), (0, 3)


def trained(dtype, kind, monkeypatch, is_on):
    """Returns the bits of weights and state after five steps, one of them skipped."""
    monkeypatch.setattr(compiled, "IS_ON", is_on)
    random = np.random.default_rng(0)
    start = [random.normal(size=shape) for shape in SHAPES]
    variables = [keras.Variable(value, dtype=dtype) for value in start]
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.01),
        initial_scale=8.0,
        master_weights=kind,
        slot_dtype="bfloat16" if dtype == "bfloat16" else None,
    )
    optimizer.build(variables)
    for step in range(5):
        grads = [torch.from_numpy(random.normal(size=s)).float() for s in SHAPES]
        if step == 2:
            grads[0][0] = torch.inf
        grads = [g.to(variables[0].value.dtype) for g in grads]
        optimizer.apply(grads, variables, scaled=True)
    assert int(optimizer.skipped_steps) == 1
    tensors = [v.value.detach() for v in [*variables, *optimizer.variables]]
    return [t.float().numpy().tobytes() for t in tensors]


@pytest.fixture
def afresh(monkeypatch):
    monkeypatch.setattr(compiled, "_has_failed", False)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["remainder", "stochastic"])
def test_compiled_formulas_give_same_bits(dtype, kind, monkeypatch, afresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = trained(dtype, kind, monkeypatch, True)
    assert not compiled._has_failed
    assert ours == trained(dtype, kind, monkeypatch, False)


def test_compiler_that_fails_is_named_once_and_changes_no_bit(monkeypatch, afresh):
    def fail(formula):
        def run(*arguments):
            raise RuntimeError("no C++ compiler")

        return run

    monkeypatch.setattr(compiled, "_compiled", fail)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler") as caught:
        ours = trained("bfloat16", "remainder", monkeypatch, True)
    assert len([w for w in caught if "torch.compile" in str(w.message)]) == 1
    assert ours == trained("bfloat16", "remainder", monkeypatch, False)
