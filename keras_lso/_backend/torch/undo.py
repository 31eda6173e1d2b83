"""Any optimizer's own step on PyTorch, undone on the device if it must be skipped.

A branch on the host would wait for the device, and no CUDA graph can record it. So the
state is copied before the step. If the step is applied, writing back moves nothing.
"""

import collections
import functools

import torch

from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.kernels import can_copy_unless, copy_unless
from keras_lso._backend.torch.no_sync import NumbersOnDevice
from keras_lso._backend.torch.shards import mapped, shards_of


def run_or_undo(finite, step, grads, state):
    """See `Framework.run_if`."""
    tensors = [v.value for v in state]
    copies = copies_of(tensors)
    # Keras's own steps convert many Python numbers to tensors.
    with NumbersOnDevice():
        step(grads)
    # In a `StatelessScope` a step does not write the tensor, but replaces it.
    pairs = zip(state, tensors, strict=True)
    storage = [tensor if v.value is tensor else v for v, tensor in pairs]
    restore(storage, copies, torch.logical_not(finite))


@torch.no_grad()
def copies_of(storage):
    """See `Framework.copies_of`. One kernel for all tensors."""
    tensors = shards_of([v if torch.is_tensor(v) else v.value for v in storage])
    copies = list(map(torch.empty_like, tensors))
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


@torch.no_grad()
def restore(storage, values, flag):
    """See `Framework.restore`. On an accelerator, kernels read the flag."""
    on_host = torch_measure.is_on_host(flag)
    if on_host and not flag:
        return
    by_dtype: dict = collections.defaultdict(lambda: ([], []))
    for v, value in zip(storage, values, strict=True):
        if not torch.is_tensor(v):
            v.assign(mapped(functools.partial(torch.where, flag, value), v.value))
            continue
        [target] = shards_of([v])
        if on_host or can_copy_unless(target):
            targets, sources = by_dtype[target.dtype]
            targets.append(target)
            sources.append(value)
        else:
            target.copy_(torch.where(flag, value, target))
    for targets, sources in by_dtype.values():
        if on_host:
            torch._foreach_copy_(targets, sources)
        else:
            copy_unless(torch.logical_not(flag).float(), targets, sources)
