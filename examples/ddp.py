"""Float16 on two processes, with PyTorch's DistributedDataParallel.

    python examples/ddp.py

It starts its own two processes. On GPUs, write "nccl" and give each a device.
"""

import os
import socket

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
import torch.distributed as dist
from keras import layers
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import keras_lso

PROCESSES = 2
EPOCHS = 6


def make_model():
    # The same weights on every process.
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, dtype="float32"),
        ]
    )


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images[..., None] / 16, dtype=torch.float32)
    return TensorDataset(images[:1400], torch.tensor(digits.target[:1400]))


def train(rank):
    # --8<-- [start:train]
    model = make_model()
    variables = model.trainable_variables
    # It averages the gradients, so every process sees an overflow of any other and
    # skips the same steps. The optimizer itself has nothing to ask the others.
    network = DistributedDataParallel(model)
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.002),
        # The defaults are 2**15 and 2000. This short run starts too high and grows
        # often, so that one can see the scale move.
        initial_scale=2.0**24,
        dynamic_growth_steps=50,
    )
    loss_fn = torch.nn.CrossEntropyLoss()
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
    check_alike(rank, [*variables, *optimizer.variables])


def check_alike(rank, variables):
    """Says whether all processes hold the same, bit for bit."""
    mine = [v.value.detach() for v in variables]
    theirs = [t.clone() for t in mine]
    for tensor in theirs:
        dist.broadcast(tensor, src=0)
    are_equal = torch.tensor(all(map(torch.equal, mine, theirs)), dtype=torch.int32)
    dist.all_reduce(are_equal, dist.ReduceOp.MIN)
    if rank == 0:
        print(f"weights and optimizer states are equal: {bool(are_equal)}")


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
