"""Any optimizer's own step on PyTorch, undone on the device if it is not to be taken.

A branch on the host would wait for the device, and no CUDA graph can record it. The
state is copied before the step, which moves 8 bytes for each of its float32 elements,
and takes that much memory until the step is over. To write it back moves nothing if the
step is to be taken.
"""

import torch

from keras_lso._backend import _torch_kernels
from keras_lso._backend._torch_numbers import NumbersOnDevice
from keras_lso._backend._torch_shards import shards_of


def run_or_undo(finite, step, grads, state):
    """See `Framework.run_if`."""
    tensors, copies = _copied(state)
    # Keras's own steps are full of numbers.
    with NumbersOnDevice():
        step(grads)
    _undo_unless(finite, state, tensors, copies)


@torch.no_grad()
def _copied(state):
    """Returns the tensors that variables hold, and copies of them."""
    tensors = [v.value for v in state]
    return tensors, [tensor.clone() for tensor in tensors]


@torch.no_grad()
def _undo_unless(finite, state, tensors, copies):
    by_dtype: dict[torch.dtype, list] = {}
    columns = state, tensors, copies, shards_of(tensors), shards_of(copies)
    for v, tensor, copy, shard, shard_of_copy in zip(*columns, strict=True):
        new = v.value
        # In a `StatelessScope` a step leaves the tensor, and puts another in its place.
        if new is tensor and _torch_kernels.can_copy_unless(shard):
            by_dtype.setdefault(shard.dtype, []).append((shard, shard_of_copy))
        else:
            v.assign(torch.where(finite, new, copy))
    for pairs in by_dtype.values():
        targets, sources = map(list, zip(*pairs, strict=True))
        _torch_kernels.copy_unless(finite.float(), targets, sources)
