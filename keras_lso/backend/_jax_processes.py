"""The mean of gradients over JAX's processes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils, sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_lso.backend import generic, processes

# What is compiled for one process's own devices cannot wait for another process.
AVERAGES_IN_STEP = False


def count_processes():
    """See `generic.count_processes`."""
    count = jax.process_count()
    # JAX before 0.5.1 does not tell: a single process is then none.
    is_initialized = getattr(jax.distributed, "is_initialized", lambda: False)
    return count if count > 1 or is_initialized() else None


def check_processes_run():
    """See `generic.check_processes_run`."""
    processes.check_run(
        count_processes(),
        "Start the program once for each process, and in each of them call "
        "`jax.distributed.initialize(coordinator_address, num_processes, process_id)` "
        "before anything else is done with JAX.",
    )


def average_over_processes(grads):
    """See `generic.average_over_processes`: all tensors of a dtype in one go."""
    check_processes_run()
    if any(isinstance(g, jax.core.Tracer) for g in jax.tree.leaves(grads)):
        raise RuntimeError(
            "On JAX gradients can be averaged over processes outside of `jax.jit` "
            "only. Do not compile the training op: it compiles itself."
        )
    grads = processes.agree([_dense(g) for g in grads], _exchange)
    # What spans the processes is one array, which all of them hold already.
    local = [None if _is_global(g) else g for g in grads]
    means = processes.map_by_dtype(_means, local)
    return [g if m is None else m for m, g in zip(means, grads, strict=True)]


def _dense(grad):
    if isinstance(grad, sparse.BCOO):
        # In float32 first: rows that come twice add up.
        grad = sparse.BCOO(
            (generic.in_float32(grad.data), grad.indices), shape=grad.shape
        ).todense()
    return None if grad is None else generic.in_float32(grad)


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
        # As it came: it may be a copy on each of this process's devices.
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
