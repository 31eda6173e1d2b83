"""The mean of gradients over JAX's processes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_lso._backend import processes
from keras_lso._backend.tensors import in_float32

HOW_TO_START = (
    "Start the program once for each process, and in each of them call "
    "`jax.distributed.initialize(coordinator_address, num_processes, process_id)` "
    "before anything else is done with JAX."
)


def count_processes():
    """See `Framework.count_processes`."""
    count = jax.process_count()
    # JAX before 0.5.1 does not say so: a single process then counts as none.
    is_initialized = getattr(jax.distributed, "is_initialized", lambda: False)
    return count if count > 1 or is_initialized() else None


def average_over_processes(framework, grads):
    """See `Framework.average_over_processes`: one exchange for each dtype.

    Not in `jax.jit`: a program for one process's devices cannot wait for another's.
    """
    framework.check_processes_run()
    if any(isinstance(g, jax.core.Tracer) for g in jax.tree.leaves(grads)):
        raise RuntimeError(
            "On JAX gradients can be averaged over processes outside of `jax.jit` "
            "only. Do not compile the training op: it compiles itself."
        )
    # In float32 first, since `to_dense` sums rows of equal index.
    wide = [g if g is None else framework.map_values(in_float32, g) for g in grads]
    dense = [g if g is None else framework.to_dense(g) for g in wide]
    grads = processes.agree(dense, _exchange)
    # A global array is the same on all processes.
    local = [None if _is_global(g) else g for g in grads]
    means = processes.map_by_dtype(_means, local)
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
        # Sharded as the gradient: on several of this process's devices, say.
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
