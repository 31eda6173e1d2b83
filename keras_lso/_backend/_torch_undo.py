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
    before = _copied(state)
    # Keras's own steps are full of numbers.
    with NumbersOnDevice():
        step(grads)
    _undo_unless(finite, state, before)


@torch.no_grad()
def _copied(state):
    """Returns pairs of the tensor that a variable holds, and a copy of it."""
    tensors = [v.value for v in state]
    return [(tensor, tensor.clone()) for tensor in tensors]


@torch.no_grad()
def _undo_unless(finite, state, before):
    by_dtype: dict[torch.dtype, list] = {}
    for v, (tensor, copy) in zip(state, before, strict=True):
        new = v.value
        # In a `StatelessScope` a step leaves the tensor, and puts another in its place.
        if new is tensor and _torch_kernels.can_copy_unless(*shards_of([tensor])):
            by_dtype.setdefault(tensor.dtype, []).append((tensor, copy))
        else:
            v.assign(torch.where(finite, new, copy))
    for pairs in by_dtype.values():
        columns = zip(*pairs, strict=True)
        tensors, copies = (shards_of(list(column)) for column in columns)
        _torch_kernels.copy_unless(finite.float(), tensors, copies)
