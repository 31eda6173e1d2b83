"""Any optimizer's own step on PyTorch, undone on the device if it must be skipped.

A branch on the host would wait for the device, and no CUDA graph can record it. So the
state is copied before the step. If the step is applied, writing back moves nothing.
"""

import torch

from keras_lso._backend.torch import kernels as torch_kernels
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.no_sync import NumbersOnDevice
from keras_lso._backend.torch.shards import shards_of


def run_or_undo(finite, step, grads, state):
    """See `Framework.run_if`."""
    tensors, copies = _copied(state)
    # Keras's own steps convert many Python numbers to tensors.
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
    pairs = []
    columns = state, tensors, copies, shards_of(tensors), shards_of(copies)
    for v, tensor, copy, shard, shard_of_copy in zip(*columns, strict=True):
        new = v.value
        # In a `StatelessScope` a step does not write the tensor, but replaces it.
        if new is tensor and torch_kernels.can_copy_unless(shard):
            pairs.append((shard, shard_of_copy))
        else:
            v.assign(torch.where(finite, new, copy))
    _copy_unless(finite, pairs)


def _copy_unless(finite, pairs):
    """Copies the second tensor of each pair to the first, unless `finite` is True."""
    by_dtype: dict[torch.dtype, list] = {}
    for pair in pairs:
        by_dtype.setdefault(pair[0].dtype, []).append(pair)
    for of_dtype in by_dtype.values():
        targets, sources = map(list, zip(*of_dtype, strict=True))
        torch_kernels.copy_unless(finite.float(), targets, sources)


# --- A few small tensors: the state of layers --------------------------------------


@torch.no_grad()
def copies_of(storage):
    """See `Framework.copies_of`. One kernel for all tensors."""
    tensors = shards_of([v if torch.is_tensor(v) else v.value for v in storage])
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


@torch.no_grad()
def restore(storage, values, flag):
    """See `Framework.restore`. On an accelerator, kernels read the flag."""
    on_host = torch_measure.is_on_host(flag)
    if on_host and not flag:
        return
    pairs = []
    for v, value in zip(storage, values, strict=True):
        if not torch.is_tensor(v):
            v.assign(torch.where(flag, value, v.value))
            continue
        [target] = shards_of([v])
        if on_host or torch_kernels.can_copy_unless(target):
            pairs.append((target, value))
        else:
            target.copy_(torch.where(flag, value, target))
    if on_host and pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
    elif pairs:
        _copy_unless(torch.logical_not(flag), pairs)
