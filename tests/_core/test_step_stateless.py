"""`stateless_apply` leaves its arguments unchanged on every path of a step."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer
from testing import kernels
from testing.harness import BACKEND, Harness, array, bits

if BACKEND == "tensorflow":
    pytest.skip("Keras has no `stateless_apply` there", allow_module_level=True)

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def guarded(inner, **options):
    return LossScaleOptimizer(inner, initial_scale=1.0, **options)


MAKERS = {
    "fused": lambda: guarded(Adam(0.1)),
    "amsgrad": lambda: guarded(Adam(0.1, amsgrad=True)),
    "centered": lambda: guarded(keras.optimizers.RMSprop(0.1, centered=True)),
    "decayed": lambda: guarded(keras.optimizers.Adadelta(0.1, weight_decay=0.1)),
    "accumulation": lambda: guarded(Adam(0.1, gradient_accumulation_steps=2)),
    "slow accumulation": lambda: guarded(
        Adam(0.1, amsgrad=True, gradient_accumulation_steps=2)
    ),
    "averages": lambda: guarded(SGD(0.1, use_ema=True, ema_overwrite_frequency=1)),
    "slow averages": lambda: guarded(
        Adam(0.1, amsgrad=True, use_ema=True, ema_overwrite_frequency=1)
    ),
    "LARC": lambda: keras_lso.LARC(Adam(0.1)),
    "LARC outside": lambda: keras_lso.LARC(guarded(Adam(0.1, amsgrad=True))),
    "LARS": lambda: keras_lso.LARS(0.1),
    "LARS, accumulation": lambda: keras_lso.LARS(0.1, gradient_accumulation_steps=2),
    "LARS, decay": lambda: keras_lso.LARS(0.1, weight_decay=0.1),
    "LAMB in it": lambda: guarded(keras_lso.LAMB(0.1)),
    "NovoGrad, averages": lambda: keras_lso.NovoGrad(0.1, use_ema=True),
}
DTYPES = ["float32", "float16", *(["float64"] if BACKEND == "torch" else [])]


def given(make, dtype):
    """Returns an optimizer, and the arguments of its `stateless_apply`."""
    run = Harness(make(), [(3,), (2, 4)], dtype)
    run.optimizer.scale_loss(ops.ones(()))
    state = [ops.copy(v.value) for v in run.optimizer.variables]
    values = [ops.array(array(v), dtype) for v in run.weights]
    return run.optimizer, state, run.scaled(run.gradients()), values


def grads_of(values):
    return [ops.ones_like(v).detach() for v in values]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(
    "are_finite, without_kernels", [(True, False), (False, False), (True, True)]
)
def test_stateless_apply_leaves_arguments_and_variables_unchanged(
    are_finite, without_kernels, make, dtype
):
    with kernels.off() if without_kernels else contextlib.nullcontext():
        optimizer, state, grads, values = given(make, dtype)
        if not are_finite:
            grads[1] = grads[1] * np.inf
        unchanged = [*state, *grads, *values, *optimizer.variables]
        before = bits(unchanged)
        for _ in range(2):
            optimizer.stateless_apply(state, grads, values)
            assert bits(unchanged) == before


on_torch = pytest.mark.skipif(BACKEND != "torch", reason="`jax.grad` follows all of it")


@on_torch
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_stateless_apply_rejects_gradients_and_state_tracked_by_autograd(make):
    """Their history would be lost: a meta-gradient would be wrong without an error."""
    import torch

    optimizer, state, grads, values = given(make, "float32")
    followed = [g.requires_grad_() * 2.0 for g in grads]
    before = bits([*state, *values])
    with pytest.raises(ValueError, match="cannot differentiate through a step"):
        optimizer.stateless_apply(state, followed, values)
    assert bits([*state, *values]) == before
    with torch.no_grad():
        optimizer.stateless_apply(state, followed, values)
    # A learned rate, or momentum.
    of_floats = next(
        i
        for i, (value, v) in enumerate(zip(state, optimizer.variables, strict=True))
        if value.is_floating_point() and not v.trainable
    )
    state[of_floats] = state[of_floats].requires_grad_()
    with pytest.raises(ValueError, match="cannot differentiate through a step"):
        optimizer.stateless_apply(state, grads_of(values), values)


@on_torch
@pytest.mark.parametrize("name", MAKERS)
def test_stateless_apply_returns_values_without_autograd_history(name):
    optimizer, state, grads, values = given(MAKERS[name], "float32")
    leaves = [v.requires_grad_() for v in values]
    new, _ = optimizer.stateless_apply(state, grads, leaves)
    assert all(v.grad_fn is None for v in new)
    # A training loop differentiates by them; averages are no parameters.
    if "averages" not in name:
        assert all(v.requires_grad for v in new)
    followed = [v * 1.0 for v in leaves]
    new, _ = optimizer.stateless_apply(state, grads, followed)
    # A meta-gradient that stopped at a leaf would be wrong without an error.
    assert not any(v.requires_grad for v in new)


@pytest.mark.skipif(BACKEND != "jax", reason="PyTorch's steps write their tensors")
def test_jax_differentiates_stateless_step():
    import jax

    optimizer, state, grads, values = given(lambda: guarded(SGD(0.5)), "float32")

    def weight(rate_of_gradient):
        scaled = [g * rate_of_gradient for g in grads]
        [first, _], _ = optimizer.stateless_apply(state, scaled, values)
        return first[0]

    expected = -0.5 * float(grads[0][0])
    assert float(jax.grad(weight)(1.0)) == pytest.approx(expected, rel=1e-6)
