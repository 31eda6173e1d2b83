"""Compiled steps on JAX, and the mean of gradients over its processes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from keras_lso._backend.host import RecordingScope
from keras_lso._backend.jax import framework
from keras_lso._backend.tensors import Tensor

HOW_TO_START = (
    "Start the program once for each process, and in each of them call "
    "`jax.distributed.initialize(coordinator_address, num_processes, process_id)` "
    "before anything else is done with JAX."
)


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles by `jax.jit`, and passes the variables as arguments."""
    compiled: dict[Any, Any] = {}  # The variables read and written, and the function.

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        if framework.any_tracer(leaves):
            raise RuntimeError(
                "This is compiled by `jax.jit` already, and assigns Keras variables. "
                "Call it outside `jax.jit` and the like."
            )
        signature = structure, tuple((x.shape, x.dtype) for x in leaves)
        if signature not in compiled:
            compiled[signature] = _compiled(step, args)
        only_read, written, stateless = compiled[signature]
        read_values = [v.value for v in only_read]
        values = [v.value for v in written]
        values = _without_aliases(values, [*read_values, *leaves])
        result, values = stateless(values, read_values, args)
        for variable, value in zip(written, values, strict=True):
            variable.assign(value)
        return result

    return call


def _compiled(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the variables that a step only reads, those it writes, and the step."""
    # `jax.jit` takes a variable that is no argument for a constant.
    with RecordingScope() as scope:
        jax.eval_shape(lambda args: jax.tree.map(jnp.asarray, step(*args)), args)
    only_read = [v for key, v in scope.read.items() if key not in scope.written]
    written = list(scope.written.values())

    def stateless(values, read_values, args):
        state = zip([*written, *only_read], [*values, *read_values], strict=True)
        with RecordingScope(list(state)) as scope:
            result = step(*args)
        return result, [scope.get_current_value(v) for v in written]

    return only_read, written, jax.jit(stateless, donate_argnums=0)


def _without_aliases(values: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Copies each value that aliases another, since all of them are donated."""
    seen = {_buffer_of(other) for other in others}
    copies = []
    for value in values:
        buffer = _buffer_of(value)
        copies.append(jnp.copy(value) if buffer in seen else value)
        seen.add(buffer)
    return copies


def _buffer_of(value: Tensor) -> int:
    """Returns the address of an array, or another number that identifies it."""
    # An array on several devices has several buffers.
    return value.unsafe_buffer_pointer() if len(value.devices()) == 1 else id(value)


def processes_run() -> bool:
    """Whether this is one of connected processes."""
    # JAX before 0.5.1 has no `is_initialized`: a single process then counts as none.
    is_initialized = getattr(jax.distributed, "is_initialized", lambda: False)
    return jax.process_count() > 1 or is_initialized()


def means_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the means over all processes; a global array is the same on all."""

    def mean(grad):
        rows = multihost_utils.process_allgather(grad).reshape(-1, *grad.shape)
        return jax.device_put(rows.mean(axis=0), grad.sharding)

    return [mean(g) if g.is_fully_addressable else g for g in grads]
