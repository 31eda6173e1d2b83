"""The network of `problem` on PyTorch, and what an engine has to equal: one process."""

import contextlib

import keras
import numpy as np
import torch
import torch.distributed
from torch.distributed.tensor import DTensor

from integration_tests.distributed import problem

NAMES = ("kernel_1", "bias_1", "kernel_2", "bias_2")


class Network(torch.nn.Module):
    """The network as plain PyTorch."""

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
    """Connects this process to the other of two; says goodbye at the end."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=2
    )
    try:
        yield
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def backward(network, optimizer, batch):
    """Adds the gradients of one batch's scaled loss up."""
    x, y, weights = map(torch.from_numpy, batch)
    optimizer.scale_loss(problem.loss_of(y, network(x), weights)).backward()


def step(network, variables, optimizer, batch):
    """Does a step on one batch."""
    network.zero_grad()
    backward(network, optimizer, batch)
    apply(variables, optimizer)


def apply(variables, optimizer):
    with torch.no_grad():
        optimizer.apply([v.value.grad for v in variables], variables)


def state_of(variables, optimizer):
    """Returns copies of what this process holds, of sharded variables its shards."""
    tensors = [v.value.detach() for v in (*variables, *optimizer.variables)]
    shards = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [np.array(t) for t in shards]


def alone(make_optimizer, batches):
    """Returns what one process records that trains on the whole batches.

    Args:
        make_optimizer: Callable that returns the optimizer.
        batches: List with a list of batches for each step, which accumulate.

    Returns:
        List of arrays, of which the first axis is the step.
    """
    network, optimizer = Network(), make_optimizer()
    variables = [keras.Variable(p) for p in network.parameters()]
    states = []
    for of_step in batches:
        network.zero_grad()
        for batch in of_step:
            backward(network, optimizer, batch)
        apply(variables, optimizer)
        states.append(state_of(variables, optimizer))
    return [np.stack(column) for column in zip(*states, strict=True)]
