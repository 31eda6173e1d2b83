"""The mean of gradients over processes on PyTorch: torch.distributed, or Horovod.

Its steps run eagerly, as Keras trains there.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from keras_lso._backend import autodiff, backend
from keras_lso._backend.tensors import in_float32, map_by_dtype
from keras_lso._backend.types import Tensor
from keras_lso.compat.backend import processes

AVERAGES_IN_STEP = True
HOW_TO_START = (
    "Call `torch.distributed.init_process_group()` first and start the program by "
    "`torchrun --nproc-per-node=2 train.py`. " + processes.or_horovod("torch")
)

trained_variables: Callable[..., list[keras.Variable]] = torch.no_grad()(
    autodiff.trained_variables
)


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """See `compat.backend.compile_step`."""
    return step


def count_processes() -> int | None:
    """See `compat.backend.count_processes`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    hvd = processes.horovod("torch")
    return hvd and hvd.size()


@torch.no_grad()
def average_over_processes(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """See `compat.backend.average_over_processes`: one exchange for each dtype."""
    grads = backend.steppable(grads)
    grads = [None if g is None else in_float32(g) for g in grads]
    if dist.is_available() and dist.is_initialized():
        exchange, mean = _exchange, _mean
    else:
        hvd = processes.horovod("torch")
        exchange, mean = hvd.allgather_object, hvd.allreduce
    return map_by_dtype(
        lambda tensors: _unflatten_dense_tensors(mean(_flatten(tensors)), tensors),
        processes.agree(grads, exchange),
    )


def _exchange(message):
    messages = [b""] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return messages


def _mean(flat):
    dist.all_reduce(flat)
    return flat / dist.get_world_size()


def _flatten(tensors):
    # A copy, even of a single tensor: `_mean` writes it.
    return torch.cat([t.reshape(-1) for t in tensors])
