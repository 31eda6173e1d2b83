"""Compiled steps on JAX, and the mean of gradients over its processes."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_lso._backend import autodiff, backend
from keras_lso._backend.jax import framework
from keras_lso._backend.tensors import in_float32, map_by_dtype
from keras_lso._backend.types import Tensor
from keras_lso.compat.backend import processes

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
    """See `compat.backend.compile_step`.

    `jax.jit` treats a variable that is not an argument as a constant. For each new
    signature, an abstract evaluation finds the variables to pass.
    """
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
    """See `compat.backend.count_processes`."""
    count = jax.process_count()
    # JAX before 0.5.1 has no `is_initialized`: a single process then counts as none.
    is_initialized = getattr(jax.distributed, "is_initialized", lambda: False)
    return count if count > 1 or is_initialized() else None


def average_over_processes(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """See `compat.backend.average_over_processes`: one exchange for each dtype."""
    if backend.is_traced(grads):
        raise RuntimeError(
            "On JAX gradients can be averaged over processes outside `jax.jit` "
            "only. Do not compile the training op: it compiles itself."
        )
    # In float32 first, since `to_dense` sums rows of equal index.
    wide = [g if g is None else backend.map_values(in_float32, g) for g in grads]
    dense = [g if g is None else backend.to_dense(g) for g in wide]
    grads = processes.agree(dense, _exchange)
    # A global array is the same on all processes.
    local = [None if _is_global(g) else g for g in grads]
    means = map_by_dtype(_means, local)
    return [g if m is None else m for m, g in zip(means, grads, strict=True)]


def _is_global(grad):
    return grad is not None and not grad.is_fully_addressable


def _exchange(message):
    rows = multihost_utils.process_allgather(np.frombuffer(message, "uint8"))
    return [row.tobytes() for row in rows.reshape(-1, len(message))]


def _means(grads):
    mesh = _one_device_of_each_process()
    over_processes = NamedSharding(mesh, PartitionSpec("processes"))
    row = jax.device_put(_flatten(grads), mesh.local_devices[0])
    rows = jax.make_array_from_single_device_arrays(
        (mesh.size, row.size), over_processes, [row]
    )
    mean = _mean_over(mesh)(rows).addressable_data(0)
    shapes = tuple(g.shape for g in grads)
    return [
        # Sharded like the gradient, which may be on several devices of this process.
        jax.device_put(m, g.sharding)
        for m, g in zip(_unflatten(mean, shapes), grads, strict=True)
    ]


def _one_device_of_each_process():
    devices: dict[int, jax.Device] = {}
    for device in jax.devices():
        devices.setdefault(device.process_index, device)
    return Mesh([devices[i] for i in range(jax.process_count())], ("processes",))


@functools.cache
def _mean_over(mesh):
    return jax.jit(
        lambda rows: rows.sum(axis=0) / mesh.size,
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )


@jax.jit
def _flatten(grads):
    return jnp.concatenate([g.reshape(-1) for g in grads])[jnp.newaxis]


@functools.partial(jax.jit, static_argnames="shapes")
def _unflatten(flat, shapes):
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    pieces = jnp.split(flat, ends[:-1])
    return [p.reshape(shape) for p, shape in zip(pieces, shapes, strict=True)]
