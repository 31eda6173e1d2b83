"""The mean of gradients over the processes of torch.distributed."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from keras_lso._backend.tensors import Tensor

HOW_TO_START = (
    "Call `torch.distributed.init_process_group()` first and start the program by "
    "`torchrun --nproc-per-node=2 train.py`."
)


def processes_run() -> bool:
    """Whether this is one of connected processes."""
    return dist.is_available() and dist.is_initialized()


@torch.no_grad()
def means_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the means over all processes, by one exchange."""
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    pieces = (flat / dist.get_world_size()).split([g.numel() for g in grads])
    return [p.reshape(g.shape) for p, g in zip(pieces, grads, strict=True)]
