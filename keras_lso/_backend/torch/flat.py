"""Tensors that follow each other in memory, and so are one flat tensor as well.

A compiled step takes a flat tensor for each column of a chunk. To gather the tensors in
one and to copy them back moves more bytes than the step. So the tensors that belong to
the optimizer (slots, masters, remainders) move into one at their first compiled step,
and are views of it from then on.

Nothing notes that they have moved: each step looks at their addresses. Tensors that lie
elsewhere, such as copies of an optimizer, are gathered or move in their turn.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso._backend.torch.layouts import is_recorded

# In bytes: what Inductor's kernels take for granted. Before a kernel writes to other
# memory, PyTorch copies it, and old versions do not copy it back.
_ALIGNED = 16


def view_of(tensors: list[Tensor]) -> Tensor | None:
    """Returns a flat view of tensors; None if they do not follow each other."""
    # Those without elements have no address.
    tensors = list(filter(torch.Tensor.numel, tensors))
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    first, width = tensors[0], tensors[0].element_size()
    start = first.data_ptr()
    ends = list(itertools.accumulate(map(torch.Tensor.numel, tensors)))
    follow = [start + end * width for end in (0, *ends[:-1])]
    if start % _ALIGNED or list(map(torch.Tensor.data_ptr, tensors)) != follow:
        return None
    # Tensors with memory of their own may have such addresses as well.
    size = (first.storage_offset() + ends[-1]) * width
    if size > first.untyped_storage().nbytes():
        return None
    return first.detach().as_strided((ends[-1],), (1,))


def gathered(tensors: list[Tensor]) -> Tensor:
    """Returns a flat copy of tensors."""
    flat = _flatten_dense_tensors(tensors)
    # That of one tensor is a view.
    return flat.clone() if len(tensors) == 1 else flat


def moved_together(tensors: list[Tensor]) -> Tensor | None:
    """Returns a flat view of tensors, which move if they can; None if they cannot."""
    tensors = list(filter(torch.Tensor.numel, tensors))
    if is_recorded():
        # A replay will write to the memory that they have now.
        for tensor in tensors:
            tensor.stays_in_memory = True
    view = view_of(tensors)
    if view is None and all(map(_can_move, tensors)):
        _move(tensors)
        view = view_of(tensors)
    return view


def _can_move(tensor: Tensor) -> bool:
    """Whether nothing but this tensor, which lasts, refers to its memory."""
    # Shards, and copies in a `StatelessScope`, are new tensors in each step. A tensor
    # that has moved stays, whatever others a later step takes with it.
    storage = tensor.untyped_storage()
    return (
        type(tensor) is torch.nn.Parameter
        and tensor.is_contiguous()
        and storage.nbytes() == tensor.nbytes
        # All memory on a GPU counts as shared between processes.
        and (tensor.is_cuda or not tensor.is_shared())
        and not (tensor.is_inference() or hasattr(tensor, "stays_in_memory"))
    )


def _move(tensors: list[Tensor]) -> None:
    """Moves tensors, which remain the same objects, into one memory."""
    # As a tensor from inference mode, it could not be written outside of that mode.
    with torch.inference_mode(False), torch.no_grad():
        flat = _flatten_dense_tensors(tensors)
        views = _unflatten_dense_tensors(flat, tensors)
        for tensor, view in zip(tensors, views, strict=True):
            if tensor.is_cuda:
                # Perhaps another stream reuses what is freed here.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            tensor.data = view
