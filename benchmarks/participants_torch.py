"""Two processes of `torch.distributed`, which talk by gloo.

Under "DDP" a step averages the gradients, as one tensor, and applies them. Under "FSDP"
each process has its shard of every tensor and of its gradient, which the backward pass
has averaged; a step applies them. Keras's optimizers alone cannot do that, so that our
step is compared with ours on plain tensors of a shard's size, which agrees with nobody.
"""

import os
import socket
from functools import partial

import keras
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import keras_lso
from benchmarks.data import check_healthy, make_data
from benchmarks.inner import INNER, SCALE
from benchmarks.participants import PARTICIPANTS, make_group, optimizers
from benchmarks.timing import Step, time_in_turn, wall_clock


def measure(shapes, inner, rounds):
    """See `participants.measure`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = port, shapes, inner, rounds, results
    multiprocessing.spawn(_participate, arguments, nprocs=PARTICIPANTS)
    return results.get()


def _participate(rank, port, shapes, inner, rounds, results):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # They share the cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // PARTICIPANTS))
    dist.init_process_group("gloo", rank=rank, world_size=PARTICIPANTS)
    mesh = init_device_mesh("cpu", (PARTICIPANTS,))
    data = make_data(shapes, "float32")
    groups = [
        _group(engine, mesh, name, shapes, data, rounds)
        for engine in _ROWS
        for name in inner
    ]
    if rank == 0:
        results.put(groups)
    dist.destroy_process_group()


def _group(engine, mesh, name, shapes, data, rounds):
    roles, clocks = {}, {}
    for row, (role, make_step) in _ROWS[engine](INNER[name].make).items():
        step = make_step(mesh, data, 1.0 if role == "inner" else SCALE)
        step.prepare()
        step.run()
        roles[row], clocks[row] = role, partial(wall_clock, step)
        if step.state()[0]:
            check_healthy(f"{engine}, {name}, {row}", step, data)
    return make_group(engine, name, shapes, roles, time_in_turn(clocks, rounds))


def _ddp_rows(make_inner):
    return {
        row: (role, partial(_ddp_step, optimizer))
        for row, (role, optimizer) in optimizers(make_inner).items()
    }


def _fsdp_rows(make_inner):
    def step(is_sharded):
        optimizer = keras_lso.LossScaleOptimizer(make_inner())
        return partial(_fsdp_step, optimizer, is_sharded)

    return {
        "keras_lso, plain tensors": ("more", step(False)),
        "keras_lso": ("ours", step(True)),
    }


def _ddp_step(optimizer, mesh, data, scale):
    variables = [keras.Variable(w) for w in data.weights]
    optimizer.build(variables)
    # In one piece, as DDP has them.
    fresh = torch.cat([torch.tensor(g * scale).ravel() for g in data.gradients])
    flat = torch.empty_like(fresh)
    pieces = flat.split([g.size for g in data.gradients])
    gradients = [p.view(g.shape) for p, g in zip(pieces, data.gradients, strict=True)]

    def prepare():
        flat.copy_(fresh)
        dist.barrier()

    @torch.no_grad()
    def run():
        dist.all_reduce(flat)
        flat.div_(PARTICIPANTS)
        optimizer.apply(gradients, variables)

    return Step(run, partial(_state, variables), prepare)


def _fsdp_step(optimizer, is_sharded, mesh, data, scale):
    def shard(array):
        sharded = distribute_tensor(torch.tensor(array), mesh, [Shard(0)])
        return sharded if is_sharded else sharded.to_local()

    variables = [keras.Variable(torch.nn.Parameter(shard(w))) for w in data.weights]
    optimizer.build(variables)
    gradients = [shard(g * scale) for g in data.gradients]

    @torch.no_grad()
    def run():
        optimizer.apply(gradients, variables)

    return Step(run, partial(_state, variables if is_sharded else []), dist.barrier)


def _state(variables):
    values = [v.value.detach() for v in variables]
    whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values]
    return [v.numpy() for v in whole], []


_ROWS = {"DDP": _ddp_rows, "FSDP": _fsdp_rows}
