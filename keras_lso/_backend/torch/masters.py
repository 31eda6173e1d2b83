"""The float32 masters of 16-bit weights and slots on PyTorch, for a whole chunk.

An object holds the masters of a chunk during one step. Where `StepContext.flag`, a
boolean scalar tensor, is False, nothing changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso._backend import codecs
from keras_lso._backend.codecs import PLAIN, SLOT_CODECS, Codec
from keras_lso._backend.leaves import Leaf
from keras_lso._backend.tensors import FLOAT16_MAX
from keras_lso._backend.torch.layouts import Strides, is_recorded, ordered
from keras_lso._backend.torch.lists import copy_unless
from keras_lso._backend.torch.measure import THREAD
from keras_lso._backend.torch.shards import first_index, is_sharded

if TYPE_CHECKING:
    from keras_lso._backend.framework import Framework
    from keras_lso._backend.torch.update import Chunk, Memory, StepContext


class PlainTensors:
    """Tensors in float32, which a step writes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def write(self) -> None:
        """Writes what is stored, after the step of `tensors`."""


class StoredMasters(PlainTensors):
    """Float32 masters that are stored: a step updates them in place."""

    def __init__(self, ctx: StepContext, chunk: Chunk, leaf: Leaf) -> None:
        super().__init__(leaf.aux)
        self._ctx, self._chunk, self._weights = ctx, chunk, leaf.variable
        resynchronise(ctx.framework, chunk, leaf.variable, leaf.aux, ctx.memory)

    def write(self) -> None:
        masters, weights = self.tensors, self._weights
        if self._ctx.flag is not None:
            _round_where(self._ctx, masters, weights)
            note_versions(self._chunk, weights, masters)
            return
        torch._foreach_copy_(weights, masters)
        if weights[0].dtype == torch.float16:
            torch._foreach_clamp_min_(weights, -FLOAT16_MAX)
            torch._foreach_clamp_max_(weights, FLOAT16_MAX)


class DecodedMasters(PlainTensors):
    """Masters that exist during one step, in one flat tensor."""

    # On the host the codec runs on pieces, which stay in the cache.

    def __init__(self, ctx: StepContext, chunk: Chunk, leaf: Leaf) -> None:
        self._ctx, self._chunk, self._leaf = ctx, chunk, leaf
        stored = _flatten_dense_tensors(leaf.variable)
        aux = _flatten_dense_tensors(leaf.aux) if leaf.aux else None
        size = stored.numel()
        length = _PIECE if ctx.is_on_host else max(size, 1)
        # The elements, and what the codec stores with them.
        block = leaf.codec.block
        self._pieces = [
            (slice(i, i + length), slice(i // block, (i + length) // block))
            for i in range(0, size, length)
        ]
        self._master = torch.empty_like(stored, dtype=torch.float32)
        with ctx.without_host():
            for piece, of_aux in self._pieces:
                self._master[piece] = leaf.codec.decode(
                    ctx.framework, stored[piece], None if aux is None else aux[of_aux]
                )
        super().__init__(list(_unflatten_dense_tensors(self._master, leaf.variable)))

    def write(self) -> None:
        ctx, leaf, dtype = self._ctx, self._leaf, self._leaf.variable[0].dtype
        stored, aux = torch.empty_like(self._master, dtype=dtype), None
        if leaf.aux:
            size = stored.numel() // leaf.codec.block
            aux = stored.new_empty(size, dtype=leaf.aux[0].dtype)
        with ctx.without_host():
            keys = None
            if leaf.codec.is_random:
                keys = self._chunk.keys(ctx, leaf.position)
            for piece, of_aux in self._pieces:
                bits = None
                if keys is not None:
                    bits = codecs.drawn(ctx.framework, keys[piece], piece.start)
                    bits = bits >> leaf.shift if leaf.shift else bits
                stored[piece], part = leaf.codec.encode(
                    ctx.framework, self._master[piece], dtype, bits
                )
                if aux is not None:
                    aux[of_aux] = part
        _write_where(ctx.flag, leaf.variable, stored)
        if aux is not None:
            _write_where(ctx.flag, leaf.aux, aux)


CODECS_OF_SLOTS = {getattr(torch, name): codec for name, codec in SLOT_CODECS.items()}
# In elements: a multiple of each codec's `block`.
_PIECE = 2**17


class RandomBits:
    """The random bits of a chunk's elements; see `codecs.random_bits`."""

    def __init__(
        self, positions: list[int], variables: list[Tensor], shards: list[Tensor]
    ) -> None:
        self._shapes = [shard.shape for shard in shards]
        sizes = [shape.numel() for shape in self._shapes]
        starts = list(itertools.accumulate(sizes[:-1], initial=0))
        pairs = zip(variables, starts, strict=True)
        places = [first_index(v) - start for v, start in pairs]
        numbers = [
            *(codecs.int32(position * codecs.WEIGHTS) for position in positions),
            *(codecs.int32(place * codecs.PLACES) for place in places),
            *starts,
        ]
        # The numbers travel as arguments of kernels: a copy would synchronise.
        flat = shards[0].new_zeros(len(numbers), dtype=torch.int64)
        torch._foreach_add_(flat.unbind(), numbers)
        # For each tensor: what its key is the hash of, with the number of the step;
        # what is added to it; and the place of the first element.
        self.table = flat.to(torch.int32).view(3, -1)

    def keys(
        self, iterations: Tensor, offset: int, strides: list[Strides | None]
    ) -> Tensor:
        """Returns the key of each element, given the number of the step.

        They are in the order of a memory with these strides. With None it is C order.
        """
        keys = _keys_of_tensors(self.table, iterations, offset)
        rows = zip(keys.unbind(), self._shapes, strides, strict=True)
        keys = [_expanded(*row) for row in rows]
        return torch.cat(keys) if len(keys) > 1 else keys[0]


def _expanded(key: Tensor, shape: torch.Size, strides: Strides | None) -> Tensor:
    """Returns the keys of a tensor's elements, for `codecs.drawn` at flat places."""
    if strides is None:
        return key.expand(shape.numel())
    # Not the bits of the place in memory, but those of the place in C order.
    flat = torch.arange(shape.numel(), dtype=torch.int32, device=key.device)
    [places] = ordered([flat.view(shape)], {0: strides})
    return (places - flat) * codecs.PLACES + key


def keys_in_kernel(
    table: Tensor, iterations: Tensor, offset: int, like: Tensor
) -> Tensor:
    """Returns `RandomBits.keys` for the elements of a flat tensor."""
    # Inductor's kernels for accelerators look an element up themselves, and read and
    # write no keys. Step by step this would take longer.
    keys, starts = _keys_of_tensors(table, iterations, offset), table[2]
    if keys.shape[0] == 1:  # Its length would be a constant of the kernel.
        return keys.expand(like.shape)
    places = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    places = places.view(like.shape)
    return keys[torch.bucketize(places, starts, out_int32=True, right=True) - 1]


def _keys_of_tensors(table: Tensor, iterations: Tensor, offset: int) -> Tensor:
    """Returns the key of each tensor, to which the place of an element is added."""
    keys, places, _ = table
    shift = codecs.int32(offset * codecs.WEIGHTS)
    return codecs.hashed(keys + iterations.to(torch.int32) + shift) + places


def _write_where(flag: Tensor | None, tensors: list[Tensor], new: Tensor) -> None:
    """Writes a flat tensor into tensors, bit for bit; where `flag`, if there is one."""
    if flag is not None:
        new = torch.where(flag, new, _flatten_dense_tensors(tensors))
    torch._foreach_copy_(tensors, _unflatten_dense_tensors(new, tensors))


def is_in_place(codec: Codec) -> bool:
    """Whether the masters of a codec are updated as `StoredMasters`."""
    # These have the formulas of this class, not those of a subclass or another codec.
    return type(codec) is codecs.Float32


def masters_of(ctx: StepContext, chunk: Chunk, leaf: Leaf) -> PlainTensors:
    """Returns the float32 tensors, for one step, of a leaf of a chunk's tensors."""
    if leaf.codec is PLAIN:
        return PlainTensors(leaf.variable)
    if is_in_place(leaf.codec):
        return StoredMasters(ctx, chunk, leaf)
    return DecodedMasters(ctx, chunk, leaf)


# --- Masters in float32 -------------------------------------------------------------
#
# A master whose weight was assigned is re-initialised. On the host each applied step
# compares all of them. On an accelerator, where it happens in a skipped step as well,
# that would take longer than the rest of the step. PyTorch counts the writes to a
# tensor, and only a chunk that others have written is compared. PyTorch does not
# count writes to `tensor.data`, by a collective of `torch.distributed`, or through
# another library's view of the same memory. After such a write, call
# `torch.autograd.graph.increment_version`.


def resynchronise(
    framework: Framework,
    chunk: Chunk,
    weights: list[Tensor],
    masters: list[Tensor],
    memory: Memory | None,
) -> None:
    """Re-initialises the masters of a chunk whose weights were assigned externally."""
    if memory is None:
        if not are_current(chunk, weights, masters):
            _resynchronise_all(framework, masters, weights)
        return
    # `torch.equal` takes ten times as long for float16 as for bits, four elements at a
    # time. These may also differ at -0.0 or beyond float16's range. The formula then
    # changes nothing.
    weight = _flatten_dense_tensors(weights)
    rounded = memory.flat(weight.numel(), weight.dtype)
    rounded.copy_(_flatten_dense_tensors(masters))
    count, offset = weight.numel(), weight.storage_offset()
    bits = torch.int64 if count and count % 4 == offset % 4 == 0 else torch.int16
    if not torch.equal(rounded.view(bits), weight.view(bits)):
        _resynchronise_all(framework, masters, weights)


def are_current(chunk: Chunk, weights: list[Tensor], masters: list[Tensor]) -> bool:
    """Whether nothing has written these tensors since `note_versions`."""
    versions = _versions_of([*masters, *weights])
    return versions is not None and versions == chunk.versions


def note_versions(chunk: Chunk, weights: list[Tensor], masters: list[Tensor]) -> None:
    """Remembers that the weights of a chunk are their masters, rounded."""
    chunk.versions = _versions_of([*masters, *weights])


def _versions_of(tensors: list[Tensor]) -> list[tuple[int, int]] | None:
    """Returns what changes when others write the tensors; None if unknown."""
    # A user's CUDA graph may be replayed after such a write. Shards, and copies in a
    # `StatelessScope`, are new tensors in each step.
    is_captured = is_recorded() and not THREAD.is_captured
    if is_captured or not all(
        isinstance(t if t._base is None else t._base, torch.nn.Parameter)
        and not t.is_inference()
        for t in tensors
    ):
        return None
    return [(t._version, t.data_ptr()) for t in tensors]


def _resynchronise_all(
    framework: Framework, masters: list[Tensor], weights: list[Tensor]
) -> None:
    """Re-initialises the masters that differ from their weights."""
    # `Float32.decode` in fewer passes: no float32 copy of the weights.
    old, value = _flatten_dense_tensors(masters), _flatten_dense_tensors(weights)
    new = torch.where(framework.rounded(old, value.dtype) == value, old, value)
    _write_where(None, masters, new)


def _round_where(
    ctx: StepContext, masters: list[Tensor], variables: list[Tensor]
) -> None:
    """Writes rounded masters into the weights where the flag is True."""
    # In one buffer, which one kernel clamps.
    flat = variables[0].new_empty(sum(v.numel() for v in variables))
    new = _unflatten_dense_tensors(flat, variables)
    torch._foreach_copy_(new, masters)
    if flat.dtype == torch.float16:
        flat.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
    if all(v.is_contiguous() for v in variables):
        copy_unless(ctx.found_inf, variables, new)
    else:
        _write_where(ctx.flag, variables, flat)


# --- Placeholders ---------------------------------------------------------------------


def without_memory(values: list[Tensor]) -> list[Tensor]:
    """See `Framework.without_memory`. All elements of a tensor share one NaN."""
    for tensor in values:
        _hold(tensor, lambda t: t.new_full((), torch.nan).expand(t.shape))
    return values


def allocate(tensors: list[Tensor]) -> None:
    """Gives tensors memory of their own."""
    for tensor in tensors:
        _hold(tensor, lambda t: t.new_empty(t.shape))


@torch.no_grad()
def _hold(tensor: Tensor, new: Callable[[Tensor], Tensor]) -> None:
    """Replaces the memory of a tensor, or of its shard."""
    if is_sharded(tensor):
        tensor._local_tensor = new(tensor._local_tensor)
    else:
        tensor.data = new(tensor)
