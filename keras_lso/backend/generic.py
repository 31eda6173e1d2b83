"""Every primitive in `keras.ops`: the reference for the other modules here.

It is written to be read, not to be fast.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso.backend.rules import l2_norm


class Measurement(NamedTuple):
    """What one read of the gradients found; all of it device tensors.

    Attributes:
        finite: Boolean scalar. No gradient holds an inf or a NaN, nor will it once
            it is unscaled.
        norms: List of what `rule.norms` returns, one for each rule; None where
            there is no rule, or where the step has to measure it itself.
        amax: Float32 scalar, the largest magnitude of all, or None.
    """

    finite: Any
    norms: Any = None
    amax: Any = None


def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None):
    """Reads the gradients once.

    Args:
        grads: List of tensors of any float dtype, dense or sparse. No None.
        amax: Bool. Whether to return the largest magnitude. Defaults to `False`.
        inv_scale: Float32 scalar. What the gradients will be multiplied by; one
            above 1 can make a finite gradient overflow. Defaults to `1.0`.
        rules: List of formulas of `rules.py`, one a gradient, whose norms are
            wanted. A finite norm proves that its gradient is finite: they are the
            check as well. Defaults to `None`.
        state: List of tuples of tensors, `(variable, *slots)`, one a rule.

    Returns:
        A `Measurement`. `finite` is what all replicas, processes and shards
        agree on, never one replica's word.
    """
    values = [in_float32(to_dense(g)) for g in grads]
    # An inf or a NaN stays one, whatever it is multiplied by.
    unscaled = [v * ops.cast(inv_scale, v.dtype) for v in values]
    finite = [ops.all(ops.isfinite(v)) for v in unscaled]
    return Measurement(
        ops.all(ops.stack(finite)),
        rules and norms_of(rules, unscaled, state),
        largest_magnitude(values) if amax else None,
    )


def norms_of(rules, grads, state):
    """Returns the norms that each rule needs of its unscaled gradient."""
    return [
        rule.norms(g, *map(in_float32, tensors)) if rule.has_norms else None
        for rule, g, tensors in zip(rules, grads, state, strict=True)
    ]


def l2_norms(tensors):
    """Returns the L2 norms of tensors, dense or sparse, summed in float32 or wider."""
    return [l2_norm(in_float32(to_dense(t))) for t in tensors]


def total(grads):
    """Returns the sum of the gradients over all replicas that apply them."""
    return grads


def in_float32(values):
    """Returns `values` in float32, or in float64 if that is what they are in."""
    values = ops.convert_to_tensor(values)
    is_double = keras.backend.standardize_dtype(values.dtype) == "float64"
    return values if is_double else ops.cast(values, "float32")


def times(values, factor):
    """Returns the product in float32, or in float64 if the values are in that."""
    values = in_float32(values)
    return values * ops.cast(factor, values.dtype)


def largest_magnitude(values):
    """Returns the largest magnitude in a list of dense tensors, in float32."""
    # `ops.max` refuses empty tensors.
    tops = [ops.max(ops.abs(v)) for v in values if 0 not in v.shape]
    if not tops:
        return ops.zeros((), dtype="float32")
    return ops.cast(ops.max(ops.stack(tops)), "float32")


def fused_step(rules, variables, slots, grads, finite=None, inv_scale=None, norms=None):
    """Unscales, skips and updates in one pass.

    Args:
        rules: For each variable a formula of `rules.py`, holding the step's
            coefficients.
        variables: List of `keras.Variable`s, the ones that are trained.
        slots: For each variable a tuple of `keras.Variable`s, in the order of
            `rule.slots`.
        grads: List of dense tensors. No None.
        finite: Boolean scalar tensor. Where False, nothing changes, bit for bit.
            Defaults to `None`: the step is applied.
        inv_scale: Float32 scalar tensor. What the gradients are multiplied by.
            Defaults to `None`: they are not scaled.
        norms: What `measure` found, for rules that have norms. Defaults to
            `None`: nothing was measured.
    """

    def keep(new, old):
        return new if finite is None else ops.where(finite, new, old)

    norms = norms or [None] * len(rules)
    for rule, variable, slot, grad, norm in zip(
        rules, variables, slots, grads, norms, strict=True
    ):
        grad = ops.cast(grad, "float32")
        if inv_scale is not None:
            grad = grad * inv_scale
        state = [variable, *slot]
        old = [ops.convert_to_tensor(v) for v in state]
        if norm is None:
            new = rule(keep, grad, *old)
        else:
            new = rule(keep, grad, *old, norms=norm)
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
