"""Compiled steps on JAX, and the mean of gradients over its processes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental import multihost_utils

from keras_lso._backend import autodiff, backend
from keras_lso._backend.jax import framework
from keras_lso._backend.types import Tensor

# A program for one process's devices cannot wait for another's.
AVERAGES_IN_STEP = False
HOW_TO_START = (
    "Start the program once for each process, and in each of them call "
    "`jax.distributed.initialize(coordinator_address, num_processes, process_id)` "
    "before anything else is done with JAX."
)

trained_variables: Callable[..., list[keras.Variable]] = framework.trained_variables


# --- Compiled steps ---------------------------------------------------------------


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles by `jax.jit`, and passes the variables as arguments."""
    compiled: dict[Any, Any] = {}

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        if backend.is_traced(leaves):
            raise RuntimeError(
                "This is compiled by `jax.jit` already, and assigns Keras variables. "
                "Call it outside `jax.jit` and the like."
            )
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


def _variables_of(step, args):
    """Returns the variables that a step only reads, and those that it writes."""
    with autodiff.RecordingScope() as scope:
        jax.eval_shape(lambda args: jax.tree.map(jnp.asarray, step(*args)), args)
    kept = [v for key, v in scope.read.items() if key not in scope.written]
    return kept, list(scope.written.values())


def _stateless(step, kept, written):
    def stateless(values, kept_values, args):
        state_mapping = [
            *zip(written, values, strict=True),
            *zip(kept, kept_values, strict=True),
        ]
        with autodiff.RecordingScope(state_mapping) as scope:
            result = step(*args)
        return result, [scope.get_current_value(v) for v in written]

    return stateless


def _own_buffers(values, others):
    """Copies each value that aliases another, since all of them are donated."""
    seen = {_buffer_of(other) for other in others}
    own = []
    for value in values:
        buffer = _buffer_of(value)
        own.append(jnp.copy(value) if buffer in seen else value)
        seen.add(buffer)
    return own


def _buffer_of(value):
    # An array on several devices has several buffers.
    return value.unsafe_buffer_pointer() if len(value.devices()) == 1 else id(value)


# --- Processes --------------------------------------------------------------------


def count_processes() -> int | None:
    """Returns the number of processes; None if none are connected."""
    count = jax.process_count()
    # JAX before 0.5.1 has no `is_initialized`: a single process then counts as none.
    is_initialized = getattr(jax.distributed, "is_initialized", lambda: False)
    return count if count > 1 or is_initialized() else None


def means_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the means over all processes; a global array is the same on all."""
    if backend.is_traced(grads):
        raise RuntimeError(
            "On JAX gradients can be averaged over processes outside `jax.jit` "
            "only. Do not compile the training op: it compiles itself."
        )
    return [g if not g.is_fully_addressable else _mean(g) for g in grads]


def _mean(grad):
    rows = multihost_utils.process_allgather(grad).reshape(-1, *grad.shape)
    return jax.device_put(rows.mean(axis=0), grad.sharding)
