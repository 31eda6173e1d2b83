"""Runs docs/which-setup.md with two devices, or as one of two processes on PyTorch.

    python -m integration_tests.distributed.worker_which_setup [RANK ADDRESS]

Prints what each device, or this process, holds at the end: `HELD [[value, ...], ...]`.
"""

import functools
import json
import sys

import keras
import numpy as np

from integration_tests.docs_blocks import BACKEND, PAGES, blocks_of

PAGE = "docs/which-setup.md"
# What all begin with, on PyTorch the loops as well, and the section of each backend.
SECTIONS = ["Which set-up do I need?"]
SECTIONS += ["A loop of your own"] if BACKEND == "torch" else []
ENDINGS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
SECTIONS += [f"Several devices on {ENDINGS[BACKEND]}"]


def run_section(heading, names):
    [block] = [block for block in blocks_of(PAGE) if block.heading == heading]
    assert block.runs_here
    exec(compile(block.source, str(PAGES[PAGE]), "exec"), names)


def on_tensorflow():
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * 2)
    # By itself it takes all GPUs of the machine, and of the CPUs the first.
    strategy = functools.partial(tf.distribute.MirroredStrategy, ["CPU:0", "CPU:1"])
    tf.distribute.MirroredStrategy = strategy
    names = {}
    for heading in SECTIONS:
        run_section(heading, names)
    local = names["strategy"].experimental_local_results
    columns = [local(v.value) for v in variables_of(names["model"])]
    return [list(held) for held in zip(*columns, strict=True)]


def on_jax():
    names = {}
    for heading in SECTIONS:
        run_section(heading, names)
    columns = [v.value.addressable_shards for v in variables_of(names["model"])]
    return [[s.data for s in held] for held in zip(*columns, strict=True)]


def on_torch(rank, address):
    import torch.distributed as dist

    dist.init_process_group("gloo", address, rank=int(rank), world_size=2)
    names = {}
    *first, together = SECTIONS
    for heading in first:
        run_section(heading, names)
    # "With its own part of the data".
    names["x"] = np.random.default_rng(int(rank)).normal(size=(32, 4)).astype("float32")
    run_section(together, names)
    # PyTorch may hang at the end if a network outlives its group.
    del names["network"]
    dist.destroy_process_group()
    variables = [*names["variables"], *names["optimizer"].variables]
    return [[v.value.detach() for v in variables]]


def variables_of(model):
    return [*model.trainable_variables, *model.optimizer.variables]


keras.utils.set_random_seed(0)
engine = {"tensorflow": on_tensorflow, "jax": on_jax, "torch": on_torch}[BACKEND]
held = [[np.asarray(v).tolist() for v in one] for one in engine(*sys.argv[1:])]
print("HELD", json.dumps(held))
