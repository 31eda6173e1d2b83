"""One read of the gradients on JAX: on a CPU, an accelerator, several devices."""

import jax
import jax.numpy as jnp

from keras_lso._backend.framework import Framework, Measurement
from keras_lso._backend.jax.axes import varying_axes
from keras_lso._backend.tensors import (
    PROOF,
    PROOF_OF_FLOAT16,
    amax_of,
    in_float32,
    is_usual,
    joint_norm,
    norm_of_all,
    pack,
    rule_norms,
)


def measure(
    framework,
    grads,
    amax=False,
    inv_scale=1.0,
    rules=None,
    targets=None,
    are_alike=False,
    norm=False,
    clips=False,
    headroom=1.0,
):
    """See `Framework.measure`."""
    # On a CPU, a finite sum of squares, or a finite norm that a rule takes, proves that
    # all elements are finite, at a third of the cost of `isfinite`. A sum that is not
    # finite proves nothing (1e20 squared is inf), nor any sum if unscaling enlarges the
    # gradients. Then every element is checked. XLA adds up the gradients three times as
    # fast as their products, so that a norm of the gradient alone is unscaled
    # afterwards.
    # The reference is better on an accelerator, where one read is the whole cost and
    # the host would take the branch, and on several devices, where XLA would gather a
    # tensor to pass it to a branch, but combines the reference's reductions to scalars
    # into one.
    values = [jnp.asarray(framework.elements_of(g)) for g in grads]
    if not is_on_one_cpu() or varying_axes(*values):
        told = inv_scale, rules, targets, are_alike, norm, clips, headroom
        return Framework.measure(framework, values, amax, *told)
    inv_scale = jnp.asarray(inv_scale, "float32")
    factor = inv_scale * headroom
    norms = plain = total = None
    are_in_float16 = all(v.dtype == "float16" for v in values)
    needs_norm = norm or (headroom > 1 and not are_in_float16)
    if needs_norm or clips:
        packs = [in_float32(v) for v in pack(values)]
        plain = norm_of_all(list(map(_norm, packs)))
    if norm or clips:
        total = jax.lax.cond(is_usual(plain), _usual, _joint, plain, packs) * inv_scale
    if rules:
        unscaled = [in_float32(v) * inv_scale for v in values]
        norms = rule_norms(framework, rules, unscaled, targets)
    if clips:
        finite = jnp.isfinite(jnp.square(total * headroom))
    elif rules and not needs_norm:
        finite = _check(values, norms, factor)
    elif needs_norm:
        is_proof = plain * factor < PROOF
        finite = jax.lax.cond(is_proof, _true, _all_finite, values, factor)
    else:
        limit = PROOF_OF_FLOAT16 if are_in_float16 else 1.0
        finite = _check(values, [None] * len(values), factor, limit)
    return Measurement(
        finite,
        rule_norms=norms,
        amax=amax_of(pack(values)) if amax else None,
        norm=total,
    )


def is_on_one_cpu():
    """Whether compiled code runs on the CPU, as one device."""
    return _is_on_cpu() and jax.device_count() == 1


def _is_on_cpu():
    return jax.default_backend() == "cpu"


def _check(values, norms, factor, limit=1.0):
    """Whether all values are finite, as finite norms or sums prove below a limit."""
    unproven = [v for v, n in zip(values, norms, strict=True) if n is None]
    proofs = [_proof(v) for v in pack(unproven)]
    proofs += [jnp.isfinite(n[0]) for n in norms if n is not None]
    return jax.lax.cond(
        jnp.stack(proofs).all() & (factor <= limit),
        _true,
        _all_finite,
        values,
        factor,
    )


def _norm(values):
    """Returns the L2 norm of one tensor."""
    # Without the barrier XLA would find that Adam takes the same squares, and write
    # them to memory for both: twice the time of the step.
    return jnp.sqrt(jnp.sum(jnp.square(jax.lax.optimization_barrier(values))))


def _proof(values):
    """Returns a boolean. True proves that all values are finite."""
    if values.dtype == "float16":
        # For a sum, XLA would write the values in float32: four times as slow.
        return jnp.isfinite(values).all()
    return jnp.isfinite(jnp.sum(jnp.square(values.astype("float32"))))


# At module level, since outside `jax.jit` a `cond` of new functions is recompiled.


def _usual(plain, packs):
    return plain


def _joint(plain, packs):
    return joint_norm(packs)


def _true(values, factor):
    return jnp.array(True)


def _all_finite(values, factor):
    # `all` takes ten times as long to compile, and `max` may lose a NaN on a CPU.
    values = [in_float32(v) * factor for v in pack(values)]
    counts = [jnp.sum(~jnp.isfinite(v), dtype="float32") for v in values]
    return jnp.stack(counts).sum() == 0
