"""One of two processes that train sharded parameters by PyTorch's `fully_shard`.

    python -m integration_tests.distributed.worker_torch_fsdp RANK FOLDER

It records every case of `fsdp_cases` in FOLDER.
"""

import sys

import keras
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

from integration_tests.distributed import problem, torch_training
from integration_tests.distributed.fsdp_cases import CASES

rank, folder = int(sys.argv[1]), sys.argv[2]


def sharded_network(mesh):
    network = torch_training.Network()
    fully_shard(network, mesh=mesh)
    return network, [keras.Variable(p) for p in network.parameters()]


def overflow(variables, step):
    """Puts an inf into one element of this process's shards."""
    shards = [v.value.grad.to_local() for v in variables]
    shard = [s for s in shards if s.numel()][step % 3]
    shard.view(-1)[step % shard.numel()] = [torch.inf, torch.nan][step % 2]


def train(optimizer_name, pattern, mesh):
    network, variables = sharded_network(mesh)
    optimizer = problem.make_optimizer(optimizer_name)
    states = []
    for step in range(problem.STEPS):
        network.zero_grad()
        batch = problem.batch_of("none", step, rank, 2)
        torch_training.backward(network, optimizer, batch)
        if rank in problem.overflowing(pattern, step, 2):
            overflow(variables, step)
        torch_training.apply(variables, optimizer)
        states.append(torch_training.state_of(variables, optimizer))
    return states
import time
with torch_training.process_group(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    for case, (optimizer_name, pattern) in CASES.items():
        t=time.time()
        states = train(optimizer_name, pattern, mesh)
        print(case, time.time()-t)
        problem.save(f"{folder}/{case}_{rank}", states)
