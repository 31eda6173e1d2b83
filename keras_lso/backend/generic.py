"""Every primitive in `keras.ops`: the reference for the other modules here.

It is written to be read, not to be fast.
"""

from typing import Any, NamedTuple

import keras
from keras import ops


class Measurement(NamedTuple):
    """What one read of the gradients found; all of it device tensors.

    Attributes:
        finite: Boolean scalar. No gradient holds an inf or a NaN, nor will it once
            it is unscaled.
        norms: List of float32 scalars, the L2 norm of each gradient, or None.
        amax: Float32 scalar, the largest magnitude of all, or None.
    """

    finite: Any
    norms: Any = None
    amax: Any = None


def measure(grads, norms=False, amax=False, inv_scale=1.0):
    """Reads the gradients once.

    Args:
        grads: List of tensors of any float dtype, dense or sparse. No None.
        norms: Bool. Whether to return the norm of each. Defaults to `False`.
        amax: Bool. Whether to return the largest magnitude. Defaults to `False`.
        inv_scale: Float32 scalar. What the gradients will be multiplied by; one
            above 1 can make a finite gradient overflow. Defaults to `1.0`.

    Returns:
        A `Measurement`. `finite` is what all replicas, processes and shards
        agree on, never one replica's word.
    """
    values = [in_float32(to_dense(g)) for g in grads]
    # An inf or a NaN stays one, whatever it is multiplied by.
    finite = [ops.all(ops.isfinite(v * ops.cast(inv_scale, v.dtype))) for v in values]
    values = [ops.cast(v, "float32") for v in values]
    return Measurement(
        ops.all(ops.stack(finite)),
        [ops.sqrt(ops.sum(ops.square(v))) for v in values] if norms else None,
        largest_magnitude(values) if amax else None,
    )


def in_float32(values):
    """Returns `values` in float32, or in float64 if that is what they are in."""
    values = ops.convert_to_tensor(values)
    is_double = keras.backend.standardize_dtype(values.dtype) == "float64"
    return values if is_double else ops.cast(values, "float32")


def largest_magnitude(values):
    """Returns the largest magnitude in a list of dense tensors, in float32."""
    # `ops.max` refuses empty tensors.
    tops = [ops.max(ops.abs(v)) for v in values if 0 not in v.shape]
    if not tops:
        return ops.zeros((), dtype="float32")
    return ops.cast(ops.max(ops.stack(tops)), "float32")


def fused_step(rule, variables, slots, grads, finite, inv_scale):
    """Unscales, skips and updates in one pass.

    Args:
        rule: A formula of `rules.py`, holding the step's coefficients.
        variables: List of `keras.Variable`s, the ones that are trained.
        slots: For each variable a tuple of `keras.Variable`s, in the order of
            `rule.slots`.
        grads: List of dense tensors, scaled. No None.
        finite: Boolean scalar tensor. Where False, nothing changes, bit for bit.
        inv_scale: Float32 scalar tensor. What the gradients are multiplied by.
    """

    def keep(new, old):
        return ops.where(finite, new, old)

    for variable, slot, grad in zip(variables, slots, grads, strict=True):
        state = [variable, *slot]
        old = [ops.convert_to_tensor(v) for v in state]
        new = rule(keep, ops.cast(grad, "float32") * inv_scale, *old)
        for v, value in zip(state, new, strict=True):
            v.assign(value)


def fused_step_takes(rule, variables, gradients):
    """The reference has no fast path."""
    return False


def run_if(finite, step, grads, state):
    """Runs `step(grads)` if `finite`, else leaves `state` as it was.

    Args:
        finite: Boolean scalar tensor.
        step: Callable of the gradients, which may write to `state` only.
        grads: List of tensors or None, handed to `step`.
        state: List of `keras.Variable`s, all that `step` may write.
    """
    # Copies: on PyTorch a step changes the variable's own tensor.
    before = [ops.copy(v) for v in state]
    step(grads)
    for v, old in zip(state, before, strict=True):
        v.assign(ops.where(finite, ops.convert_to_tensor(v), old))


def compute_gradients(loss_fn, variables):
    """Returns the loss and its gradients, of which None where there is none."""
    raise NotImplementedError(
        "This Keras backend computes no gradients. Set KERAS_BACKEND to "
        "'tensorflow', 'jax' or 'torch' to train."
    )


def map_values(fn, grad):
    """Applies the elementwise `fn` to the values of a dense or sparse gradient."""
    return fn(grad)


def to_dense(grad):
    """Returns the gradient as a dense tensor; rows that come twice add up."""
    return ops.add(grad, ops.zeros(ops.shape(grad), dtype=grad.dtype))
