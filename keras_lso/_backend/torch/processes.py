"""The mean of gradients over processes on PyTorch: torch.distributed, or Horovod."""

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from keras_lso._backend import processes
from keras_lso._backend.tensors import in_float32

HOW_TO_START = (
    "Call `torch.distributed.init_process_group()` first and start the program by "
    "`torchrun --nproc-per-node=2 train.py`. " + processes.or_horovod("torch")
)


def count_processes():
    """See `Framework.count_processes`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    hvd = processes.horovod("torch")
    return hvd and hvd.size()


@torch.no_grad()
def average_over_processes(framework, grads):
    """See `Framework.average_over_processes`: one exchange for each dtype."""
    framework.check_processes_run()
    grads = framework.steppable(grads)
    grads = [None if g is None else in_float32(g) for g in grads]
    if dist.is_available() and dist.is_initialized():
        exchange, mean = _exchange, _mean
    else:
        hvd = processes.horovod("torch")
        exchange, mean = hvd.allgather_object, hvd.allreduce
    return processes.map_by_dtype(
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
