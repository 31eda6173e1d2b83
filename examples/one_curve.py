"""One loss curve by one process, by DDP and by FSDP2, with an overflow on one rank.

    python examples/one_curve.py [--output .]

Trains the same float16 network from the same weights on the same batches three times:
in one process, in two with PyTorch's DistributedDataParallel, and in two with FSDP2,
which share the weights. In step 60 the gradients of the second half of the batch are
made infinite: in one process those of the batch, with two processes those of rank 1
alone. All of them skip that step and halve the loss scale. It prints a table, writes
`one_curve.json`, and draws the three curves over each other into `one_curve.png`.
"""

import argparse
import json
import os
import pathlib
import socket

os.environ["KERAS_BACKEND"] = "torch"

import keras
import matplotlib
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import keras_lso

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WAYS = {"one process": 1, "DDP": 2, "FSDP2": 2}
STEPS, BATCH_SIZE, OVERFLOW_AT = 200, 64, 60
STYLES = {
    "one process": {"color": "gray", "alpha": 0.8, "linewidth": 6},
    "DDP": {"color": "C0", "linewidth": 2.5},
    "FSDP2": {"color": "C1", "linewidth": 1.2, "linestyle": "--"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs = {way: run(way, count) for way, count in WAYS.items()}
    written = arguments.output / "one_curve.json"
    written.write_text(json.dumps({"results": runs}, indent=1) + "\n")
    draw(runs, written.with_suffix(".png"))
    Console(highlight=False).print(make_table(runs))
    print(f"Wrote {written} and a picture.")


def run(way, count):
    """Trains in new processes, and returns the record of the first."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    told = way, count, address, results
    context = torch.multiprocessing.spawn(work, told, nprocs=count, join=False)
    record = results.get()
    while not context.join():
        pass
    return record


def work(rank, way, count, address, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", address, rank=rank, world_size=count)
    record = train(rank, way, count)
    if rank == 0:
        results.put(record)
    dist.destroy_process_group()


def train(rank, way, count):
    """Returns the losses of the whole batches, and what the optimizer has counted."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.ReLU()
    ).append(nn.Linear(64, 10))
    parallel = network
    if way == "DDP":
        parallel = DistributedDataParallel(network)
    elif way == "FSDP2":
        policy = MixedPrecisionPolicy(torch.float16, torch.float32, torch.float32)
        mesh = init_device_mesh("cpu", (count,))
        parallel = fully_shard(network, mesh=mesh, mp_policy=policy)
    variables = [keras.Variable(p, name=n) for n, p in network.named_parameters()]
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.002), dynamic_growth_steps=50
    )
    images, labels = load_data()
    order = torch.Generator().manual_seed(0)
    losses = []
    for step in range(STEPS):
        batch = torch.randint(len(images), (BATCH_SIZE,), generator=order)
        mine = batch.chunk(count)[rank]
        network.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = parallel(images[mine])
        loss = nn.functional.cross_entropy(outputs.float(), labels[mine])
        scaled = optimizer.scale_loss(loss)
        if step == OVERFLOW_AT and rank == count - 1:
            scaled = scaled * torch.inf
        scaled.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        mean = loss.detach() / count
        dist.all_reduce(mean)
        losses.append(float(mean))
    return {
        "losses": losses,
        "loss_scale": float(optimizer.loss_scale),
        "skipped_steps": int(optimizer.skipped_steps),
    }


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    return images, torch.tensor(digits.target)


def make_table(runs):
    table = Table("way", "skipped steps", "loss scale", "last loss", "furthest apart")
    reference = runs["one process"]["losses"]
    for way, record in runs.items():
        pairs = zip(record["losses"], reference, strict=True)
        apart = max(abs(loss - other) for loss, other in pairs)
        scale = f"{record['loss_scale']:.0f}"
        last = f"{record['losses'][-1]:.4f}"
        table.add_row(way, str(record["skipped_steps"]), scale, last, f"{apart:.4f}")
    return table


def draw(runs, path):
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for way, record in runs.items():
        axes.plot(record["losses"], label=way, **STYLES[way])
    axes.axvline(OVERFLOW_AT, color="gray", linewidth=0.8)
    axes.annotate("overflow on rank 1:\nall skip", (OVERFLOW_AT + 3, 1.5))
    axes.set(xlabel="step", ylabel="loss of the batch", yscale="log")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
