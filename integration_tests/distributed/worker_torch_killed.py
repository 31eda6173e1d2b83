"""One of two processes that train by DDP and by FSDP2, with a checkpoint now and then.

    python -m integration_tests.distributed.worker_torch_killed RANK FOLDER [KILLED_AT]

It goes on from the last checkpoint in FOLDER, and writes down the state at the end. At
step KILLED_AT the last process kills itself, while the first one writes.

In the end it trains once more from the start, undisturbed, to compare with.
"""

import os
import pathlib
import signal
import sys

import keras
import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from integration_tests.distributed import problem, torch_training
from integration_tests.distributed.torch_training import Case

STEPS, PERIOD = 20, 5

rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
killed_at = int(sys.argv[3]) if sys.argv[3:] else None


def make():
    """Returns what is trained: of each engine the network, its variables, and so on."""
    networks = {
        "ddp": DistributedDataParallel(torch_training.Network()),
        "fsdp": fully_shard(
            torch_training.Network(), mesh=init_device_mesh("cpu", (2,))
        ),
    }
    trained = {}
    for engine, network in networks.items():
        variables = [keras.Variable(p) for p in network.parameters()]
        optimizer = problem.make_optimizer("Adam")
        optimizer.build(variables)
        trained[engine] = network, variables, optimizer
    return trained


def state_dict(trained):
    """Returns the tensors themselves, which `dcp.load` writes into."""
    return {
        f"{engine}/{i}": v.value.detach()
        for engine, (_, variables, optimizer) in trained.items()
        for i, v in enumerate([*variables, *optimizer.variables])
    }


def save(trained, step):
    """Writes a checkpoint, which has its name only once it is complete."""
    unfinished = folder / f"unfinished_{step}"
    if rank == 0:
        unfinished.mkdir(exist_ok=True)
    torch.distributed.barrier()
    if step == killed_at and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dcp.save(state_dict(trained), checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(folder / f"step_{step}")


def load(trained):
    """Goes on from the last checkpoint; returns how many steps that has."""
    steps = [int(path.name.split("_")[1]) for path in folder.glob("step_*")]
    if steps:
        dcp.load(state_dict(trained), checkpoint_id=folder / f"step_{max(steps)}")
    return max(steps, default=0)


def step(network, variables, optimizer, number):
    network.zero_grad()
    [batch] = torch_training.batches_of(Case("Adam", "random"), number, rank)
    torch_training.backward(network, optimizer, batch)
    torch_training.apply(variables, optimizer)


def finish(trained, first, name, save):
    """Does the steps that are left, and writes down what comes out of them."""
    for number in range(first, STEPS):
        for of_engine in trained.values():
            step(*of_engine, number)
        if (number + 1) % PERIOD == 0:
            save(trained, number + 1)
    states = [torch_training.state_of(v, o) for _, v, o in trained.values()]
    problem.save(folder / f"{name}_{rank}", [sum(states, [])])


def resume():
    trained = make()
    first = load(trained)
    print("FROM", first)
    finish(trained, first, "disturbed", save)


with torch_training.process_group(rank, folder):
    resume()
    finish(make(), 0, "undisturbed", save=lambda trained, step: None)
