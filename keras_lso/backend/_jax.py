"""The primitives on JAX: stateless under `jax.jit`, eager outside it."""

import jax
import jax.numpy as jnp
import keras
from jax.experimental import sparse
from keras import ops

from keras_lso.backend import generic, rules
from keras_lso.backend.generic import Measurement, fused_step, total

__all__ = [
    "compute_gradients",
    "fused_step",
    "fused_step_takes",
    "l2_norms",
    "map_values",
    "measure",
    "run_if",
    "to_dense",
    "total",
]


def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None):
    """See `generic.measure`.

    A sum of squares that is finite proves finite elements, at a third of the cost
    of `isfinite` over all of them, and so does a norm that a rule needs anyway. One
    that is not proves nothing (1e20 squared is inf), nor does any if unscaling
    makes the gradients larger: only then every element is looked at.
    """
    values = [jnp.asarray(_values(g)) for g in grads]
    norms = [None] * len(values)
    if rules:
        unscaled = [generic.in_float32(v) * inv_scale for v in values]
        norms = generic.norms_of(rules, unscaled, state)
    proofs = [
        jnp.sum(jnp.square(v.astype("float32"))) if n is None else n[0]
        for v, n in zip(values, norms, strict=True)
    ]
    finite = jax.lax.cond(
        jnp.isfinite(jnp.stack(proofs)).all() & (inv_scale <= 1),
        _true,
        _all_finite,
        values,
        jnp.asarray(inv_scale, "float32"),
    )
    return Measurement(
        finite,
        norms if rules else None,
        generic.largest_magnitude(values) if amax else None,
    )


# Outside `jax.jit` a `cond` is compiled anew for functions that are new.


def _true(values, inv_scale):
    return jnp.array(True)


def _all_finite(values, inv_scale):
    values = [generic.in_float32(v) for v in values]
    return jnp.stack([jnp.isfinite(v * inv_scale).all() for v in values]).all()


def run_if(finite, step, grads, state):
    """See `generic.run_if`.

    A `jax.lax.cond` copies the state through its branches. Here both happen, and
    each write is a select between the new value and the old one, which XLA fuses
    into the update: what the step reads back is masked already, so that it never
    needs an old value beside the new one and all stays in place.
    """
    with _MaskedWrites(finite) as scope:
        step(grads)
    for variable in scope.written.values():
        variable.assign(scope.get_current_value(variable))


class _MaskedWrites(keras.StatelessScope):
    """A scope in which variables take new values only where `finite` is True."""

    def __init__(self, finite):
        super().__init__()
        self.written = {}
        self._finite = finite

    def get_current_value(self, variable):
        """Returns what was written here, else what an outer scope holds."""
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update):
        variable, value = update
        self.written[id(variable)] = variable
        super().add_update((variable, jnp.where(self._finite, value, variable.value)))


def fused_step_takes(rule, variables, gradients):
    """Whether the rule has norms, which then need not be taken twice.

    `run_if` is a select on JAX, which XLA fuses into any optimizer's update: no
    other rule is faster than the optimizer itself.
    """
    return (
        rule.has_norms
        and not any(isinstance(g, sparse.BCOO) for g in gradients)
        and not any(g.dtype == "float64" for g in gradients)
        and all(v.dtype == "float32" for v in variables)
    )


def compute_gradients(loss_fn, variables):
    """See `generic.compute_gradients`."""

    def stateless_loss(values):
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return ops.convert_to_tensor(loss_fn())

    return jax.value_and_grad(stateless_loss)([v.value for v in variables])


def map_values(fn, grad):
    """See `generic.map_values`."""
    if isinstance(grad, sparse.BCOO):
        return sparse.BCOO((fn(grad.data), grad.indices), shape=grad.shape)
    return fn(grad)


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
