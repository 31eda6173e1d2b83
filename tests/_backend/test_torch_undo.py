"""Steps that are undone on the device, on a CPU that is taken for one."""

import math

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import loss_scales

if keras.backend.backend() != "torch":
    pytest.skip("PyTorch's way to run or leave out a step", allow_module_level=True)

torch = pytest.importorskip("torch")

from keras_lso._backend import backend  # noqa: E402
from testing import beside_keras  # noqa: E402
from testing.beside_keras import bits  # noqa: E402

K = keras.optimizers
SCALE = 1024.0
OPTIMIZERS = {
    "Adadelta": lambda: K.Adadelta(0.1),
    "Adafactor": lambda: K.Adafactor(0.1),
    "Ftrl": lambda: K.Ftrl(0.1),
    "Lamb": lambda: K.Lamb(0.1),
    "Adam, amsgrad": lambda: K.Adam(0.1, amsgrad=True),
    "SGD of a subclass": lambda: Steps(0.1, momentum=0.9),
    "constraint": lambda: K.SGD(0.1),
}


class Steps(K.SGD):
    """One that no rule is known of."""


@pytest.fixture(autouse=True)
def on_an_accelerator(monkeypatch):
    beside_keras.take("accelerator", monkeypatch)


def variables_of(name, dtype="float32"):
    rng = np.random.default_rng(0)
    constraint = keras.constraints.UnitNorm() if name == "constraint" else None
    variables = []
    for shape in [(3,), (4, 2), ()]:
        value = rng.normal(size=shape).astype(dtype)
        variable = keras.Variable(value, dtype=dtype)
        variable.constraint = constraint if shape else None
        variables.append(variable)
    return variables


def gradients(count, seed=1):
    rng = np.random.default_rng(seed)
    shapes = [(3,), (4, 2), ()]
    return [
        [torch.tensor(rng.normal(size=shape), dtype=torch.float32) for shape in shapes]
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_applied_steps_match_keras_and_skipped_steps_change_no_bit(name):
    ours, theirs = variables_of(name), variables_of(name)
    inner, reference = OPTIMIZERS[name](), OPTIMIZERS[name]()
    optimizer = keras_lso.LossScaleOptimizer(
        inner, loss_scale=loss_scales.FixedLossScale(SCALE)
    )
    optimizer.build(ours)
    reference.build(theirs)
    for i, grads in enumerate(gradients(4)):
        bad = [g * SCALE for g in grads]
        bad[i % 2] = bad[i % 2] * [np.nan, np.inf][i % 2]
        state = [*ours, *inner.variables]
        before = bits(state)
        optimizer.apply(bad)
        assert bits(state) == before
        optimizer.apply([g * SCALE for g in grads])
        reference.apply(grads)
    for mine, other in zip(
        [*ours, *inner.variables], [*theirs, *reference.variables], strict=True
    ):
        # Keras's fused kernels take the rate as a number, and round once less.
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_skipped_step_of_float16_and_float64_variables_changes_no_bit(dtype):
    variables = variables_of("", dtype)
    optimizer = keras_lso.LossScaleOptimizer(
        Steps(0.1, momentum=0.9), initial_scale=SCALE, master_weights=False
    )
    optimizer.build(variables)
    (grads,) = gradients(1)
    state = [*variables, *optimizer.inner_optimizer.variables]
    before = bits(state)
    optimizer.apply(
        [g.to(v.value.dtype) / 0.0 for g, v in zip(grads, variables, strict=True)]
    )
    assert bits(state) == before
    optimizer.apply(
        [g.to(v.value.dtype) for g, v in zip(grads, variables, strict=True)]
    )
    assert all(a != b for a, b in zip(bits(variables), before[:3], strict=True))


@pytest.mark.parametrize("is_finite", [True, False])
def test_stateless_step_returns_old_weights_when_skipped(is_finite):
    variables = variables_of("")
    optimizer = keras_lso.LossScaleOptimizer(Steps(0.1, momentum=0.9))
    optimizer.build(variables)
    (grads,) = gradients(1)
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
