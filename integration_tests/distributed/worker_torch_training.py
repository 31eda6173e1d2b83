"""One of two processes that train together; records every step.

    python -m integration_tests.distributed.worker_torch_training RANK FOLDER ENGINE

It trains all of `torch_training.CASES[ENGINE]`.
"""

import contextlib
import sys

import keras
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from integration_tests.distributed import problem, torch_training

rank, folder, engine = int(sys.argv[1]), *sys.argv[2:]


class DDP:
    """Each process has all variables; PyTorch averages the gradients."""

    def __init__(self, case):
        if case.network == "Keras":
            network = torch_training.keras_network()
            self.variables = network.trainable_variables
        else:
            network = torch_training.Network()
            self.variables = [keras.Variable(p) for p in network.parameters()]
        self.network = DistributedDataParallel(network)

    def alone(self):
        return self.network.no_sync()


class FSDP:
    """Each process has a shard of every variable, and of its gradient."""

    mesh = None

    def __init__(self, case):
        FSDP.mesh = FSDP.mesh or init_device_mesh("cpu", (2,))
        self.network = fully_shard(torch_training.Network(), mesh=FSDP.mesh)
        self.variables = [keras.Variable(p) for p in self.network.parameters()]

    @contextlib.contextmanager
    def alone(self):
        self.network.set_requires_gradient_sync(False)
        yield
        self.network.set_requires_gradient_sync(True)

    def overflow(self, step):
        """Puts an inf or a NaN into one element of this process's shards."""
        shards = [v.value.grad.to_local() for v in self.variables]
        shard = shards[step % len(shards)]
        shard.view(-1)[step % shard.numel()] = [torch.inf, torch.nan][step % 2]


def train(case):
    trained = {"ddp": DDP, "fsdp": FSDP}[engine](case)
    optimizer = torch_training.make_optimizer(case.optimizer)
    states = []
    for step in range(case.steps):
        trained.network.zero_grad()
        overflows = rank in problem.overflowing(case.pattern, step, 2)
        in_loss = case if case.where == "loss" else case._replace(pattern="none")
        *others, last = torch_training.batches_of(in_loss, step, rank)
        with trained.alone() if others else contextlib.nullcontext():
            for batch in others:
                torch_training.backward(trained.network, optimizer, batch)
        torch_training.backward(trained.network, optimizer, last)
        if overflows and case.where == "shard":
            trained.overflow(step)
        torch_training.apply(trained.variables, optimizer)
        states.append(torch_training.state_of(trained.variables, optimizer))
    return states


with torch_training.process_group(rank, folder):
    for case in torch_training.CASES[engine]:
        problem.save(f"{folder}/{case.name}_{rank}", train(case))
