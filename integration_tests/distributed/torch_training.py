"""The runs of two PyTorch processes, and of one process in their place."""

import contextlib
from typing import NamedTuple

import keras
import numpy as np
import torch
import torch.distributed
from torch.distributed.tensor import DTensor

import keras_lso
from integration_tests.distributed import problem
from testing import tiers

NAMES = ("kernel_1", "bias_1", "kernel_2", "bias_2")
NARROW_SLOTS = "Adam with bfloat16 slots"


class Case(NamedTuple):
    """A run.

    Attributes:
        optimizer: One of `problem.OPTIMIZERS`, `"accumulating"` or `NARROW_SLOTS`.
        pattern: One of `problem.PATTERNS`.
        where: What overflows: the `"loss"`, or a `"shard"` of one process.
        micro_batches: How many batches add up before the gradients are averaged. The
            first of them overflows.
        network: `"plain"`, or `"Keras"` for a Keras model.
        steps: How many.
    """

    optimizer: str
    pattern: str
    where: str = "loss"
    micro_batches: int = 1
    network: str = "plain"
    steps: int = problem.STEPS

    @property
    def name(self):
        return ", ".join(map(str, self))


# An optimizer treats all patterns alike, and each step takes its time.
_FEW, _MORE = (40, 100) if tiers.is_full() else (20, 40)


def _cases(where):
    others = [name for name in problem.OPTIMIZERS if name != "momentum"]
    return [
        *(Case("momentum", pattern, where) for pattern in problem.PATTERNS),
        *(Case(name, "random", where, steps=_MORE) for name in others),
        *(Case(name, "first", where, steps=_FEW) for name in others),
        Case("accumulating", "random", where, steps=_FEW),
        Case(NARROW_SLOTS, "random", where, steps=_FEW),
        Case("Adam", "random", micro_batches=3, steps=_FEW),
        Case(problem.SPIKES, problem.SPIKES, steps=40),
    ]


CASES = {
    "ddp": [*_cases("loss"), Case("LARS", "last", network="Keras", steps=_FEW)],
    "fsdp": [*_cases("shard"), Case("LARS", "last", steps=_FEW)],
}


def make_optimizer(name):
    if name == NARROW_SLOTS:
        return problem.make_optimizer("Adam", slot_dtype="bfloat16")
    if name != "accumulating":
        return problem.make_optimizer(name)
    return keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        initial_scale=2.0**10,
        dynamic_growth_steps=3,
    )


class Network(torch.nn.Module):
    """The network of `problem` as plain PyTorch."""

    def __init__(self):
        super().__init__()
        for name, value in zip(NAMES, problem.initial_weights(), strict=True):
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))

    def forward(self, x):
        return problem.predict([getattr(self, name) for name in NAMES], x)


def keras_network():
    """The network as a Keras model."""
    model = keras.Sequential(
        [
            keras.Input((problem.INPUTS,)),
            keras.layers.Dense(problem.HIDDEN, activation="tanh"),
            keras.layers.Dense(problem.OUTPUTS),
        ]
    )
    model.set_weights(problem.initial_weights())
    return model


@contextlib.contextmanager
def process_group(rank, folder):
    """Connects this process to the other of two, and disconnects at the end.

    No `DistributedDataParallel` may outlive it: PyTorch deadlocks now and then where
    the last that holds a gloo group is the reducer in there, which ends the group's
    threads while it keeps them from Python.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    try:
        yield
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def batches_of(case, step, participant):
    """Returns the micro-batches of one participant at this step."""
    count = case.micro_batches
    if count == 1:
        return [problem.batch_of(case.pattern, step, participant, 2)]
    batches = [
        problem.batch_of("none", step * count + i, participant, 2) for i in range(count)
    ]
    if participant in problem.overflowing(case.pattern, step, 2):
        _, _, weights = batches[0]
        weights[step % problem.BATCH_SIZE] = np.inf
    return batches


def backward(network, optimizer, batch):
    """Adds up the gradients of a batch's scaled loss."""
    x, y, weights = map(torch.from_numpy, batch)
    optimizer.scale_loss(problem.loss_of(y, network(x), weights)).backward()


@torch.no_grad()
def apply(variables, optimizer):
    optimizer.apply([v.value.grad for v in variables], variables)


def state_of(variables, optimizer):
    """Returns copies of the variables, or of their shards in this process."""
    tensors = [v.value.detach() for v in (*variables, *optimizer.variables)]
    shards = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    # NumPy has no bfloat16.
    wide = [t.float() if t.dtype == torch.bfloat16 else t for t in shards]
    return [np.array(t) for t in wide]


def train_alone(case):
    """Returns the columns of one process that trains on the concatenated batches."""
    network, optimizer = Network(), make_optimizer(case.optimizer)
    variables = [keras.Variable(p) for p in network.parameters()]
    states = []
    for step in range(case.steps):
        network.zero_grad()
        for pair in zip(*(batches_of(case, step, p) for p in range(2)), strict=True):
            whole = [np.concatenate(parts) for parts in zip(*pair, strict=True)]
            backward(network, optimizer, whole)
        apply(variables, optimizer)
        states.append(state_of(variables, optimizer))
    return [np.stack(column) for column in zip(*states, strict=True)]
