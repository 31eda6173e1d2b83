"""The reference of `measure`, `fused_step` and `run_if` in `keras.ops`.

It is written to be read. `Framework` says what the arguments are; each fast path is
tested against these functions, and `KERAS_LSO_KERNELS=generic` runs them instead.
"""

from keras import ops

from keras_lso._backend.tensors import amax_of, in_float32


def measure(framework, grads, amax, inv_scale, rules, state):
    """See `Framework.measure`."""
    values = [in_float32(framework.to_dense(g)) for g in grads]
    # An inf or a NaN stays one, whatever it is multiplied by.
    unscaled = [v * ops.cast(inv_scale, v.dtype) for v in values]
    finite = [ops.all(ops.isfinite(v)) for v in unscaled]
    overflows = ops.logical_not(ops.all(ops.stack(finite)))
    return framework.Measurement(
        finite=framework.sum_over_shards(ops.cast(overflows, "float32")) == 0,
        rule_norms=rules and rule_norms(framework, rules, unscaled, state),
        amax=framework.max_over_shards(amax_of(values)) if amax else None,
    )


def rule_norms(framework, rules, unscaled, state):
    """Returns `Measurement.rule_norms` of unscaled gradients."""
    return [
        framework.norms_of(rule, g, *of_one)
        for rule, g, of_one in zip(rules, unscaled, state, strict=True)
    ]


def fused_step(
    framework,
    rules,
    variables,
    slots,
    grads,
    found,
    inv_scale,
    low_precision_variables,
):
    """See `Framework.fused_step`."""

    def select(new, old):
        return new if found is None else ops.where(found.finite, new, old)

    nothing = [None] * len(rules)
    all_norms = nothing if found is None else found.rule_norms or nothing
    for rule, variable, slot, grad, norms, low in zip(
        rules,
        variables,
        slots,
        grads,
        all_norms,
        low_precision_variables or nothing,
        strict=True,
    ):
        grad = ops.cast(grad, "float32")
        if inv_scale is not None:
            grad = grad * inv_scale
        state = [variable, *slot]
        old = [ops.convert_to_tensor(v) for v in state]
        if low is not None:
            low_value = ops.convert_to_tensor(low)
            old[0] = select(framework.resynchronised(old[0], low_value), old[0])
        norms = norms or framework.norms_of(rule, grad, *old)
        new = rule(select, grad, *old, norms=norms)
        for v, value in zip(state, new, strict=True):
            v.assign(value)
        if low is not None:
            low.assign(select(framework.rounded(new[0], low_value.dtype), low_value))


def run_if(finite, step, grads, state):
    """See `Framework.run_if`."""
    # Copies: on PyTorch a step changes the variable's own tensor.
    before = [ops.copy(v) for v in state]
    step(grads)
    for v, old in zip(state, before, strict=True):
        v.assign(ops.where(finite, ops.convert_to_tensor(v), old))
