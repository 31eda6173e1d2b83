"""The primitives on PyTorch: eager, in place."""

import contextlib

import torch
from keras import ops
from torch.utils import _pytree

from keras_lso.backend import generic
from keras_lso.backend._torch_masters import restarted, rounded
from keras_lso.backend._torch_numbers import without_host
from keras_lso.backend._torch_processes import (
    AVERAGES_IN_STEP,
    average_over_processes,
    check_processes_run,
    count_processes,
)
from keras_lso.backend._torch_shard_checks import check_shards
from keras_lso.backend._torch_sharded_step import (
    fused_step,
    fused_step_takes,
    l2_norms,
    measure,
)
from keras_lso.backend._torch_shards import any_sharded, sharded_like
from keras_lso.backend.generic import (
    check_replica_context,
    compile_step,
    is_traced,
    is_variable,
    outside_of_functions,
    register_list_class,
    total,
)

__all__ = [
    "AVERAGES_IN_STEP",
    "UPDATES_IN_PLACE",
    "any_sharded",
    "as_gradient",
    "average_over_processes",
    "check_processes_run",
    "check_replica_context",
    "check_shards",
    "compile_step",
    "compute_gradients",
    "count_processes",
    "differentiate",
    "fused_step",
    "fused_step_takes",
    "is_traced",
    "is_variable",
    "l2_norms",
    "map_values",
    "measure",
    "outside_of_functions",
    "register_list_class",
    "restarted",
    "rounded",
    "run_if",
    "scalar",
    "sharded_like",
    "to_dense",
    "total",
    "trained_variables",
    "with_positions",
    "without_host",
]


def run_if(finite, step, grads, state):
    """See `generic.run_if`."""
    if finite:
        step(grads)


UPDATES_IN_PLACE = True


def scalar(value, dtype):
    """See `generic.scalar`.

    A number is written on the device: a copy to it, PyTorch would wait for.
    """
    if isinstance(value, int | float):
        return ops.zeros((), dtype=dtype).fill_(value)
    return generic.scalar(value, dtype)


def compute_gradients(loss_fn, variables, grad_loss=None, tape=None):
    """See `generic.compute_gradients`."""
    generic.refuse_tape(tape)
    known = () if callable(variables) else [v.value for v in variables]
    with torch.enable_grad(), _requiring_grad(known):
        loss = torch.as_tensor(loss_fn())
        if callable(variables):
            variables = variables()
        return loss, _gradients(loss, variables, grad_loss)


def differentiate(loss, variables, transform, grad_loss=None, tape=None):
    """See `generic.differentiate`."""
    generic.refuse_tape(tape)
    with torch.enable_grad():
        return _gradients(transform(loss), variables, grad_loss)


def _gradients(loss, variables, grad_loss):
    values = [v.value for v in variables]
    # Autograd refuses those that it was never told to follow.
    followed = [v for v in values if v.requires_grad]
    if not loss.requires_grad or not followed:
        return [None] * len(variables)
    weights = generic.weights_of(loss, grad_loss)
    grads = iter(torch.autograd.grad(loss, followed, weights, allow_unused=True))
    return [next(grads) if v.requires_grad else None for v in values]


@contextlib.contextmanager
def _requiring_grad(tensors):
    """Lets autograd follow variables that are not trainable, too."""
    frozen = [t for t in tensors if not t.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


@torch.no_grad()
def trained_variables(loss_fn):
    """See `generic.trained_variables`."""
    return generic.trained_variables(loss_fn)


def with_positions(items):
    """See `generic.with_positions`."""
    return [(_pytree.SequenceKey(i), item) for i, item in enumerate(items)]


def as_gradient(value):
    """See `generic.as_gradient`, which takes longer to tell what nearly all are."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value
    return generic.as_gradient(value)


def map_values(fn, grad):
    """See `generic.map_values`."""
    return fn(grad)


def to_dense(grad):
    """See `generic.to_dense`: Keras has no sparse gradients on PyTorch."""
    return grad
