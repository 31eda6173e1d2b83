"""Float16 on two processes that share one model's weights, with PyTorch's FSDP2.

    python examples/fsdp.py

It starts its own two processes. On GPUs write "nccl", "cuda" and a device for each.
"""

import os
import socket

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import keras_lso

PROCESSES = 2
EPOCHS = 6


def make_network():
    """Returns a plain PyTorch network; this process holds half of its weights."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    # --8<-- [start:network]
    # Weights and their slots are float32. The network computes in float16. Gradients
    # are added up in float32, in which a sum does not overflow.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    return fully_shard(
        network, mesh=init_device_mesh("cpu", (PROCESSES,)), mp_policy=policy
    )
    # --8<-- [end:network]


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    return TensorDataset(images[:1400], torch.tensor(digits.target[:1400]))


def train(rank):
    network = make_network()
    # --8<-- [start:train]
    # After `fully_shard`, which makes new parameters. With their names, which the
    # patterns of `exclude_from_weight_decay=[...]` look for.
    variables = [keras.Variable(p, name=n) for n, p in network.named_parameters()]
    # Each process sees the gradients of its own half only. Before the optimizer steps,
    # or skips, the processes agree whether all gradients are finite.
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.002),
        # The defaults are 2**15 and 2000. This short run starts too high and grows
        # often, so that one can see the scale move.
        initial_scale=2.0**24,
        dynamic_growth_steps=50,
    )
    loss_fn = nn.CrossEntropyLoss()
    data = load_data()
    sampler = DistributedSampler(data)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 50, sampler=sampler):
            network.zero_grad()
            loss = loss_fn(network(x), y)
            optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)
        # --8<-- [end:train]
        if rank == 0:
            print(
                f"epoch {epoch + 1}: loss {loss:.3f}, "
                f"loss scale {optimizer.loss_scale:.0f}, "
                f"skipped steps {optimizer.skipped_steps}"
            )
    check_alike(rank, optimizer, variables)


def check_alike(rank, optimizer, variables):
    """Says whether all processes have skipped alike, and the weights are finite."""
    counters = torch.stack([optimizer.skipped_steps, optimizer.loss_scale.long()])
    of_all = [torch.empty_like(counters) for _ in range(PROCESSES)]
    dist.all_gather(of_all, counters)
    whole = [v.value.detach().full_tensor() for v in variables]
    if rank == 0:
        is_alike = all(torch.equal(c, counters) for c in of_all)
        print(f"loss scales and skipped steps are equal: {is_alike}")
        print(f"weights are finite: {all(w.isfinite().all() for w in whole)}")


def run(rank, address):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", address, rank=rank, world_size=PROCESSES)
    train(rank)
    # Outside `train`: a network that outlives its group may hang at the end.
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    torch.multiprocessing.spawn(run, (address,), nprocs=PROCESSES)
