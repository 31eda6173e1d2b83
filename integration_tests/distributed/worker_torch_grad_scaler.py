"""One of two processes that train by DDP and PyTorch's own `GradScaler`.

    python -m integration_tests.distributed.worker_torch_grad_scaler RANK FOLDER

Prints the weight and the scale after each step. The first overflows on the last
process only.
"""

import json
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from integration_tests.distributed import torch_training

rank, folder = int(sys.argv[1]), sys.argv[2]


def train():
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    network = DistributedDataParallel(module)
    sgd = torch.optim.SGD(module.parameters(), 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflowing in (1, None):
        sgd.zero_grad()
        x = torch.full((1, 1), torch.inf if rank == overflowing else 1.0)
        scaler.scale(network(x).sum()).backward()
        scaler.step(sgd)
        scaler.update()
        print("STATE", json.dumps([module.weight.item(), scaler.get_scale()]))


with torch_training.process_group(rank, folder):
    train()
