"""The reference of `measure`, `fused_step` and `run_if` in `keras.ops`.

`Framework` documents the arguments. Each fast path is tested against these functions,
and `KERAS_LSO_KERNELS=generic` runs them instead.
"""

import functools
import math

from keras import ops

from keras_lso._backend import formulas
from keras_lso._backend.tensors import amax_of, times


def measure(framework, grads, amax, inv_scale, rules, targets, norm):
    """See `Framework.measure`."""
    dense = [framework.to_dense(g) for g in grads]
    # An inf or a NaN stays one, whatever it is multiplied by.
    unscaled = [times(v, inv_scale) for v in dense]
    finite = [ops.all(ops.isfinite(v)) for v in unscaled]
    overflows = ops.logical_not(ops.all(ops.stack(finite)))
    finite = framework.sum_over_shards(ops.cast(overflows, "float32")) == 0
    total = norm_of_all(framework.l2_norms(grads)) * inv_scale if norm else None
    if norm:
        finite = ops.logical_and(finite, ops.isfinite(ops.square(total)))
    return framework.Measurement(
        finite=finite,
        rule_norms=rules and rule_norms(framework, rules, unscaled, targets),
        amax=framework.max_over_shards(amax_of(dense)) if amax else None,
        norm=total,
    )


def norm_of_all(norms):
    """Returns the L2 norm of all tensors together, of the norm of each."""
    norms = ops.stack([ops.cast(norm, "float32") for norm in norms])
    return ops.sqrt(ops.sum(ops.square(norms)))


def rule_norms(framework, rules, unscaled, targets):
    """Returns `Measurement.rule_norms` of unscaled gradients."""
    return [
        framework.norms_of(rule, g, *of_one)
        for rule, g, of_one in zip(rules, unscaled, targets.states, strict=True)
    ]


def fused_step(framework, rules, targets, grads, found, inv_scale):
    """See `Framework.fused_step`."""

    def select(new, old):
        return new if found is None else ops.where(found.finite, new, old)

    nothing = [None] * len(rules)
    norms, copies = found and found.rule_norms, targets.copies
    columns = rules, targets.states, grads, norms or nothing, copies or nothing
    for rule, state, grad, measured, copy in zip(*columns, strict=True):
        grad = ops.cast(grad, "float32")
        if inv_scale is not None:
            grad = grad * inv_scale
        old = [ops.convert_to_tensor(v) for v in state]
        if copy is not None:
            low = ops.convert_to_tensor(copy)
            old[0] = select(framework.resynchronised(old[0], low), old[0])
        measured = measured or framework.norms_of(rule, grad, *old)
        new = rule(formulas, select, grad, *old, norms=measured)
        for v, value in zip(state, new, strict=True):
            v.assign(value)
        if copy is not None:
            copy.assign(select(framework.rounded(new[0], low.dtype), low))


def are_finite(framework, tensors):
    """See `Framework.are_finite`."""
    numbers = list(map(framework.known, tensors))
    pairs = zip(numbers, tensors, strict=True)
    unknown = [ops.isfinite(tensor) for number, tensor in pairs if number is None]
    if not all(number is None or math.isfinite(number) for number in numbers):
        return ops.zeros((), dtype="bool")
    return functools.reduce(ops.logical_and, unknown) if unknown else None


def synchronise_masters(framework, targets, flag):
    """See `Framework.synchronise_masters`."""
    for master, copy in targets.masters:
        old, low = map(ops.convert_to_tensor, (master, copy))
        new = framework.resynchronised(old, low)
        master.assign(ops.where(flag, new, old))


def clipped(framework, grads, inv_scale, norm, value):
    """See `Framework.clipped`."""
    unscaled = [times(g, inv_scale) for g in grads]
    if not norm:
        return [ops.clip(g, -value, value) for g in unscaled]
    norms = framework.l2_norms(unscaled)
    return [
        g * (norm / ops.maximum(of_one, norm))
        for g, of_one in zip(unscaled, norms, strict=True)
    ]


def run_if(finite, step, grads, state):
    """See `Framework.run_if`."""
    # Copies: on PyTorch a step changes the variable's own tensor.
    before = [ops.copy(v) for v in state]
    step(grads)
    for v, old in zip(state, before, strict=True):
        v.assign(ops.where(finite, ops.convert_to_tensor(v), old))
