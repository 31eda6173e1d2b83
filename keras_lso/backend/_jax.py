"""The primitives on JAX: stateless under `jax.jit`, eager outside it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from keras import ops

from keras_lso.backend import generic
from keras_lso.backend._jax_axes import (
    HAS_NAMED_AXES,
    are_shards,
    check_axis_is_bound,
    mean_over,
)
from keras_lso.backend._jax_measure import l2_norms, measure, to_dense
from keras_lso.backend._jax_processes import (
    AVERAGES_IN_STEP,
    average_over_processes,
    check_processes_run,
    count_processes,
)
from keras_lso.backend.generic import (
    UPDATES_IN_PLACE,
    check_replica_context,
    fused_step,
    is_variable,
    outside_of_functions,
    scalar,
    with_positions,
    without_host,
)

__all__ = [
    "AVERAGES_IN_STEP",
    "HAS_NAMED_AXES",
    "UPDATES_IN_PLACE",
    "are_shards",
    "as_gradient",
    "average_over_processes",
    "check_processes_run",
    "check_replica_context",
    "compile_step",
    "compute_gradients",
    "count_processes",
    "differentiate",
    "fused_step",
    "fused_step_takes",
    "is_traced",
    "is_variable",
    "l2_norms",
    "map_values",
    "measure",
    "outside_of_functions",
    "register_list_class",
    "run_if",
    "scalar",
    "to_dense",
    "total",
    "trained_variables",
    "with_positions",
    "without_host",
]


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


class _MaskedWrites(generic.RecordingScope):
    """A scope in which variables take new values only where `finite` is True."""

    def __init__(self, finite):
        super().__init__()
        self._finite = finite

    def add_update(self, update):
        variable, value = update
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


def compute_gradients(loss_fn, variables, grad_loss=None, tape=None):
    """See `generic.compute_gradients`.

    JAX differentiates by the values that the variables are to have. A list of
    variables that only `loss_fn` makes complete takes a first run.
    """
    generic.refuse_tape(tape)
    if callable(variables):
        trained_variables(loss_fn)
        variables = variables()
    scope: Any = None

    def stateless_loss(values):
        nonlocal scope
        state_mapping = list(zip(variables, values, strict=True))
        with generic.RecordingScope(state_mapping) as scope:
            loss = ops.convert_to_tensor(loss_fn())
        return loss, [scope.state_mapping[key] for key in scope.written]

    values = [v.value for v in variables]
    loss, pull_back, new_values = jax.vjp(stateless_loss, values, has_aux=True)
    for variable, value in zip(scope.written.values(), new_values, strict=True):
        variable.assign(value)
    [grads] = pull_back(generic.weights_of(loss, grad_loss))
    # JAX has zeros for what the loss does not depend on.
    return loss, [
        g if id(v) in scope.read else None
        for g, v in zip(grads, variables, strict=True)
    ]


def differentiate(loss, variables, transform, grad_loss=None, tape=None):
    """See `generic.differentiate`."""
    generic.refuse_tape(tape)
    raise ValueError(
        "On JAX a tensor does not know how it was computed, so it cannot be "
        "differentiated. Pass a `loss` without arguments to be called, such as "
        "`lambda: loss_fn(y, model(x))`. "
        f"Received: loss={loss!r}"
    )


def trained_variables(loss_fn):
    """See `generic.trained_variables`."""
    # Shapes are all that is needed to see who is read.
    return generic.trained_variables(
        lambda: ops.convert_to_tensor(loss_fn()), jax.eval_shape
    )


def compile_step(step):
    """See `generic.compile_step`.

    To `jax.jit` a variable that is not handed in is a constant. Which ones there are
    shows in a run on shapes alone, for each new signature.
    """
    compiled: dict[Any, Any] = {}

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        _refuse_tracers(leaves)
        signature = structure, tuple((x.shape, x.dtype) for x in leaves)
        if signature not in compiled:
            kept, written = _variables_of(step, args)
            stateless = jax.jit(_stateless(step, kept, written), donate_argnums=0)
            compiled[signature] = kept, written, stateless
        kept, written, stateless = compiled[signature]
        kept_values = [v.value for v in kept]
        values = _own_buffers([v.value for v in written], [*kept_values, *leaves])
        result, values = stateless(values, kept_values, args)
        for variable, value in zip(written, values, strict=True):
            variable.assign(value)
        return result

    return call


def is_traced(values):
    """See `generic.is_traced`."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))


def _refuse_tracers(values):
    if is_traced(values):
        raise RuntimeError(
            "This is compiled by `jax.jit` already, and assigns Keras variables. Call "
            "it outside of `jax.jit` and the like."
        )


def _variables_of(step, args):
    """Returns the variables that a step only reads, and those that it writes."""
    with generic.RecordingScope() as scope:
        jax.eval_shape(lambda args: jax.tree.map(jnp.asarray, step(*args)), args)
    kept = [v for key, v in scope.read.items() if key not in scope.written]
    return kept, list(scope.written.values())


def _stateless(step, kept, written):
    def stateless(values, kept_values, args):
        state_mapping = [
            *zip(written, values, strict=True),
            *zip(kept, kept_values, strict=True),
        ]
        with generic.RecordingScope(state_mapping) as scope:
            result = step(*args)
        return result, [scope.get_current_value(v) for v in written]

    return stateless


def _own_buffers(values, others):
    """Returns the values; those whose buffer another has as well are copied.

    They are donated, which a buffer can be only once, and only if nobody else reads it.
    """
    seen = {_buffer_of(other) for other in others}
    own = []
    for value in values:
        buffer = _buffer_of(value)
        own.append(jnp.copy(value) if buffer in seen else value)
        seen.add(buffer)
    return own


def _buffer_of(value):
    # Arrays on several devices have several.
    return value.unsafe_buffer_pointer() if len(value.devices()) == 1 else id(value)


def register_list_class(cls):
    """See `generic.register_list_class`."""
    jax.tree_util.register_pytree_node(
        cls, lambda items: (list(items), None), lambda _, items: cls(items)
    )


def as_gradient(value):
    """See `generic.as_gradient`."""
    return generic.as_real(value, map_values)


def map_values(fn, grad):
    """See `generic.map_values`."""
    if isinstance(grad, sparse.BCOO):
        return sparse.BCOO((fn(grad.data), grad.indices), shape=grad.shape)
    return fn(grad)


def total(grads, axis_name=None):
    """See `generic.total`."""
    if axis_name is None:
        return grads
    check_axis_is_bound(axis_name)
    return [
        g if g is None else mean_over(axis_name, generic.in_float32(to_dense(g)))
        for g in grads
    ]
