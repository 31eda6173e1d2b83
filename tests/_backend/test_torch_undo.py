"""Steps that are undone on the device, on a CPU that is taken for one."""

import math

import keras
import numpy as np
import pytest

import keras_lso

if keras.backend.backend() != "torch":
    pytest.skip("PyTorch's way to run or leave out a step", allow_module_level=True)

torch = pytest.importorskip("torch")

from keras_lso._backend import backend  # noqa: E402
from testing import harness  # noqa: E402
from testing.harness import SCALE, BesideKeras, bits, steps_by_rule  # noqa: E402

K = keras.optimizers
OPTIMIZERS = {
    "Adadelta": K.Adadelta,
    "Adafactor": K.Adafactor,
    "Ftrl": K.Ftrl,
    "Adam, amsgrad": lambda rate: K.Adam(rate, amsgrad=True),
    "SGD of a subclass": lambda rate: Steps(rate, momentum=0.9),
    "constraint": K.SGD,
}


class Steps(K.SGD):
    """One that no rule is known of."""


@pytest.fixture(autouse=True)
def on_an_accelerator(monkeypatch):
    harness.take("accelerator", monkeypatch)


def variables_and_gradients(dtype="float32"):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape) for shape in [(3,), (4, 2), ()]]
    variables = [keras.Variable(v.astype(dtype), dtype=dtype) for v in values]
    return variables, [torch.full_like(v.value, SCALE) for v in variables]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_applied_steps_match_keras_and_skipped_steps_change_no_bit(name):
    run = BesideKeras(OPTIMIZERS[name])
    if name == "constraint":
        for variable in run.weights + run.keras.weights:
            variable.constraint = keras.constraints.UnitNorm()
    for bad in (np.nan, np.inf, np.nan, np.inf):
        run.overflow(bad)
        run.step()
    assert not steps_by_rule(run.optimizer)
    # Keras's fused kernels take the rate as a number, and round once less.
    run.assert_alike(1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_skipped_step_of_float16_and_float64_variables_changes_no_bit(dtype):
    variables, grads = variables_and_gradients(dtype)
    optimizer = keras_lso.LossScaleOptimizer(
        Steps(0.1, momentum=0.9), initial_scale=SCALE, master_weights=False
    )
    optimizer.build(variables)
    state = [*variables, *optimizer.inner_optimizer.variables]
    before = bits(state)
    optimizer.apply([g / 0.0 for g in grads])
    assert bits(state) == before
    optimizer.apply(grads)
    assert all(a != b for a, b in zip(bits(variables), before[:3], strict=True))


@pytest.mark.parametrize("is_finite", [True, False])
def test_stateless_step_returns_old_weights_when_skipped(is_finite):
    variables, grads = variables_and_gradients()
    optimizer = keras_lso.LossScaleOptimizer(Steps(0.1, momentum=0.9))
    optimizer.build(variables)
    if not is_finite:
        grads[0] = grads[0] * np.nan
    values = [v.value.detach().clone() for v in variables]
    state = [v.value.detach().clone() for v in optimizer.variables]
    before = bits([*variables, *optimizer.variables])
    weights, _ = optimizer.stateless_apply(state, grads, values)
    for new, old in zip(weights, values, strict=True):
        assert torch.equal(new, old) is not is_finite
    # The variables themselves stay, as in each stateless step.
    assert bits([*variables, *optimizer.variables]) == before


def test_run_if_undoes_strided_columns_only():
    matrix = torch.arange(16.0).reshape(4, 4)
    weights = keras.Variable(np.zeros((4, 2), "float32"))
    weights.value.data = matrix[:, ::2]
    values = weights.numpy().copy()
    for finite in (False, True):
        backend.run_if(
            torch.tensor(finite),
            lambda grads: weights.assign_add(grads[0]),
            [torch.ones(4, 2)],
            [weights],
        )
        np.testing.assert_array_equal(weights.numpy(), values + finite)
    np.testing.assert_array_equal(matrix[:, 1], [1.0, 5.0, 9.0, 13.0])


@pytest.mark.parametrize("skipped", [True, False])
def test_layer_state_is_restored_only_if_step_is_skipped(skipped):
    """Whatever the dtype and the layout, and only if the step was skipped."""
    tensors = [
        torch.arange(6.0),
        torch.tensor([-0.0, math.nan, math.inf]),
        torch.tensor(2.0**-24, dtype=torch.float16),
        torch.tensor(1.0, dtype=torch.float64),
        torch.arange(16.0).reshape(4, 4)[:, ::2],
        torch.tensor([7, 8]),
        torch.tensor(True),
    ]
    start = bits(tensors)
    copies = backend.copies_of(tensors)
    for tensor in tensors:
        tensor.fill_(3)
    written = bits(tensors)
    backend.restore(tensors, copies, torch.tensor(skipped))
    assert written != start
    assert bits(tensors) == (start if skipped else written)
