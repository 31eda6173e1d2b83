"""One read of the gradients on JAX: on one CPU, on others, on several devices."""

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from keras_lso.backend import generic, rules
from keras_lso.backend._jax_axes import varying_axes
from keras_lso.backend.generic import Measurement
from keras_lso.backend.shards import max_over_shards, sum_over_shards


def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None, are_alike=False):
    """See `generic.measure`.

    A sum of squares that is finite proves finite elements, at a third of the cost
    of `isfinite` over all of them, and so does a norm that a rule needs anyway. One
    that is not proves nothing (1e20 squared is inf), nor does any if unscaling
    makes the gradients larger: only then every element is looked at.

    XLA's sums over the gradients as they came are three times as fast as those over
    a product, so that a norm which is of nothing else is unscaled afterwards.

    That holds on a CPU. Elsewhere reading is all that it costs, and a branch would be
    taken by the host.
    """
    values = [jnp.asarray(_values(g)) for g in grads]
    if jax.device_count() > 1 or varying_axes(*values):
        return _measure_on_devices(values, amax, inv_scale, rules, state)
    if not _is_on_cpu():
        return generic.measure(values, amax, inv_scale, rules, state)
    inv_scale = jnp.asarray(inv_scale, "float32")
    if rules and all(rule.measures_gradient_only for rule in rules):
        finite, norms = _check_by_norms(values, inv_scale)
        norms = [(norm,) for norm in norms]
    else:
        norms = rules and generic.norms_of(
            rules, [generic.in_float32(v) * inv_scale for v in values], state
        )
        finite = _check(values, norms or [None] * len(values), inv_scale)
    top = generic.largest_magnitude(generic.pack(values)) if amax else None
    return Measurement(finite, norms, top)


def _is_on_cpu():
    return jax.default_backend() == "cpu"


def _measure_on_devices(values, amax, inv_scale, rules, state):
    """Measures what may be shared among devices.

    XLA would gather the parts of a tensor to put them together with another one, or to
    hand them to a branch. Looked at by itself, each tensor is a scalar to be added up,
    and XLA adds up all of those at once.
    """
    inv_scale = jnp.asarray(inv_scale, "float32")
    unscaled = [generic.in_float32(v) * inv_scale for v in values]
    norms = rules and generic.norms_of(rules, unscaled, state)
    # Not by a sum: on a CPU XLA would add up each tensor's elements together with its
    # squares, in one loop that takes twice as long as both.
    bad = ~jnp.stack([jnp.isfinite(v).all() for v in unscaled])
    finite = sum_over_shards(jnp.sum(bad, dtype="float32")) == 0
    top = max_over_shards(generic.largest_magnitude(values)) if amax else None
    return Measurement(finite, norms, top)


def _check(values, norms, inv_scale):
    """Whether all are finite, which they are if their norms or their sums are."""
    unproven = [v for v, n in zip(values, norms, strict=True) if n is None]
    proofs = [_proof(v) for v in generic.pack(unproven)]
    proofs += [jnp.isfinite(n[0]) for n in norms if n is not None]
    return jax.lax.cond(
        jnp.stack(proofs).all() & (inv_scale <= 1),
        _true,
        _all_finite,
        values,
        inv_scale,
    )


def _proof(values):
    """Returns a boolean which, if True, proves that all are finite."""
    if values.dtype == "float16":
        # XLA writes them in float32 before it adds them up: four times as slow.
        return jnp.isfinite(values).all()
    return jnp.isfinite(jnp.sum(jnp.square(values.astype("float32"))))


# Outside `jax.jit` a `cond` is compiled anew for functions that are new.


def _true(values, inv_scale):
    return jnp.array(True)


def _all_finite(values, inv_scale):
    # A sum, since `all` takes ten times as long to compile, and since `max` may lose a
    # NaN on a CPU.
    values = [generic.in_float32(v) * inv_scale for v in generic.pack(values)]
    return _count_not_finite(values) == 0


def _count_not_finite(values):
    counts = [jnp.sum(~jnp.isfinite(v), dtype="float32") for v in values]
    return jnp.stack(counts).sum()


def _check_by_norms(values, inv_scale):
    """Returns whether all are finite, and the norms of the unscaled gradients."""
    values = [generic.in_float32(v) for v in values]
    norms = [rules.l2_norm(v) for v in values]
    return jax.lax.cond(
        jnp.isfinite(jnp.stack(norms)).all() & (inv_scale <= 1),
        _unscaled_norms,
        _look_again,
        norms,
        values,
        inv_scale,
    )


# Norms leave as scalars: XLA takes four times as long to compile all that reads them
# where they are slices of one tensor.


def _unscaled_norms(norms, values, inv_scale):
    return jnp.array(True), [norm * inv_scale for norm in norms]


def _look_again(norms, values, inv_scale):
    unscaled = [rules.l2_norm(v * inv_scale) for v in values]
    return _all_finite(values, inv_scale), unscaled


def l2_norms(tensors):
    """See `generic.l2_norms`."""
    return [rules.l2_norm(generic.in_float32(_values(t))) for t in tensors]


def to_dense(grad):
    """See `generic.to_dense`."""
    return grad.todense() if isinstance(grad, sparse.BCOO) else grad


def _values(grad):
    """The elements of a gradient; a sparse one may name an index twice."""
    if isinstance(grad, sparse.BCOO):
        return grad.sum_duplicates(nse=grad.nse).data
    return grad
