"""Tensors in the order of their memory, such as weights in `torch.channels_last`.

Kernels pair the elements of several tensors by their places in memory. So what an
optimizer keeps for a weight has the strides of the weight, and a step works on flat
views. A dense tensor fills its memory, without gaps and overlaps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from keras_lso._backend.leaves import Leaves

Strides = tuple[int, ...]


def are_dense(tensors: list[Tensor]) -> bool:
    """Whether all of the tensors are dense."""
    return all(map(torch.Tensor.is_contiguous, tensors)) or all(map(_is_dense, tensors))


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is dense."""
    return tensor.is_contiguous() or _are_dense(tensor.shape, tensor.stride())


@functools.lru_cache(maxsize=4096)
def _are_dense(shape: torch.Size, strides: Strides) -> bool:
    """Whether tensors of this shape, which have elements, are dense."""
    size = 1
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count > 1 and stride != size:
            return False
        size *= count
    return True


def flat(tensors: list[Tensor]) -> list[Tensor]:
    """Returns 1D views in the order of memory, and copies of what is not dense."""
    if all(map(torch.Tensor.is_contiguous, tensors)):
        return list(map(torch.Tensor.view, tensors, itertools.repeat(-1)))
    dense = [t if _is_dense(t) else t.contiguous() for t in tensors]
    return [t.as_strided((t.numel(),), (1,)) for t in dense]


def in_memory_order(
    leaves: Leaves, grads: list[Tensor]
) -> tuple[Leaves, list[Tensor], dict[int, Strides]]:
    """Returns flat tensors in place of those of dense weights, if not contiguous.

    And the strides of these weights, by their positions. What the optimizer keeps is
    laid out anew where it has other strides, and gradients are copied.
    """
    likes, kept = leaves.variables, [*leaves.slots, leaves.aux]
    if leaves.follow_gradients:
        likes, kept = grads, [leaves.variables]
    present: Iterable[Tensor] = itertools.chain(likes, *kept)
    if leaves.codecs or leaves.has_gaps:
        present = (t for t in present if t is not None)
    if all(map(torch.Tensor.is_contiguous, present)):
        return leaves, grads, {}
    strides = {
        i: t.stride()
        for i, t in enumerate(likes)
        if not t.is_contiguous() and _is_dense(t)
    }
    for column in kept:
        _lay_out(column, strides)
    columns = leaves.variables, leaves.aux, grads, *leaves.slots
    variables, aux, grads, *slots = [ordered(column, strides) for column in columns]
    return leaves._replace(variables=variables, slots=slots, aux=aux), grads, strides


def _lay_out(column: Sequence[Tensor | None], strides: dict[int, Strides]) -> None:
    """Gives tensors these strides by their positions, and makes others contiguous."""
    for i, tensor in enumerate(column):
        # A slot may be a number.
        if tensor is None or not tensor.dim():
            continue
        of_weight = strides.get(i)
        fits = tensor.stride() == of_weight if of_weight else tensor.is_contiguous()
        if fits:
            continue
        if is_recorded():
            raise RuntimeError(
                "The optimizer's tensors get the memory format of their weights in a "
                "step, which a CUDA graph must not record. Take one step before."
            )
        # Tensors from inference mode must not be written outside that mode.
        with torch.inference_mode(False), torch.no_grad():
            tensor.data = _copied(tensor, of_weight)


def _copied(tensor: Tensor, strides: Strides | None) -> Tensor:
    """Returns a copy with these strides; None: those of a contiguous one."""
    if strides is None:
        return tensor.contiguous()
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def ordered(
    column: Sequence[Tensor | None], strides: dict[int, Strides]
) -> list[Tensor | None]:
    """Returns a column with flat tensors at the positions of these strides.

    They have the elements as they lie in memory with the strides, and are views of
    tensors that have these strides.
    """
    flattened = list(column)
    for i, of_weight in strides.items() if flattened else ():
        tensor = flattened[i]
        if tensor is not None and tensor.dim():
            if tensor.stride() != of_weight:
                tensor = _copied(tensor, of_weight)
            flattened[i] = tensor.as_strided((tensor.numel(),), (1,))
    return flattened


def is_recorded() -> bool:
    """Whether a CUDA graph records what is called."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
