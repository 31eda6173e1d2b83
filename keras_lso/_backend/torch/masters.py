"""The float32 masters of 16-bit weights and slots on PyTorch, for a whole chunk.

An object holds the masters of a chunk during one step. Where `StepContext.flag`, a
boolean scalar tensor, is False, nothing changes.
"""

import itertools
import operator

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso._backend import codecs
from keras_lso._backend.leaves import SLOT_CODEC, SLOT_DTYPE, draw_of_slot
from keras_lso._backend.tensors import FLOAT16_MAX
from keras_lso._backend.torch.lists import copy_unless
from keras_lso._backend.torch.shards import first_index, is_sharded


class StoredMasters:
    """Float32 masters that are stored: a step updates them in place."""

    def __init__(self, ctx, chunk, weights, masters):
        self._ctx, self._chunk, self._weights = ctx, chunk, weights
        resynchronise(ctx.framework, chunk, weights, masters, ctx.memory)
        self.tensors = masters

    def write(self):
        """Writes the weights, and the tensors of their codec."""
        masters, weights = self.tensors, self._weights
        if self._ctx.flag is not None:
            _round_where(self._ctx, masters, weights)
            self._chunk.written = _versions_of([*masters, *weights])
            return
        torch._foreach_copy_(weights, masters)
        if weights[0].dtype == torch.float16:
            torch._foreach_clamp_min_(weights, -FLOAT16_MAX)
            torch._foreach_clamp_max_(weights, FLOAT16_MAX)


class DecodedMasters:
    """Masters that exist during one step, in one flat tensor; see `StoredMasters`."""

    # On the host the codec runs on pieces, which stay in the cache. `draw` is the
    # offset of the positions for random bits, and the shift of these.

    def __init__(self, ctx, codec, stored, aux, random_bits, draw=(0, 0)):
        self._ctx, self._codec, self._stored, self._aux = ctx, codec, stored, aux
        self._random_bits, (self._offset, self._shift) = random_bits, draw
        stored = _flatten_dense_tensors(self._stored)
        aux = _flatten_dense_tensors(self._aux) if self._aux else None
        size = stored.numel()
        length = _PIECE if ctx.is_on_host else max(size, 1)
        self._pieces = [slice(i, i + length) for i in range(0, size, length)]
        self._master = torch.empty_like(stored, dtype=torch.float32)
        with ctx.without_host():
            for piece in self._pieces:
                self._master[piece] = codec.decode(
                    ctx.framework, stored[piece], None if aux is None else aux[piece]
                )
        self.tensors = list(_unflatten_dense_tensors(self._master, self._stored))

    def write(self):
        """See `StoredMasters.write`."""
        ctx, dtype = self._ctx, self._stored[0].dtype
        stored, aux = torch.empty_like(self._master, dtype=dtype), None
        if self._aux:
            aux = torch.empty_like(stored, dtype=self._aux[0].dtype)
        with ctx.without_host():
            keys = None
            if self._codec.is_random:
                keys = self._random_bits.keys(ctx.iterations, self._offset)
            for piece in self._pieces:
                bits = None
                if keys is not None:
                    bits = codecs.drawn(ctx.framework, keys[piece], piece.start)
                    bits = bits >> self._shift if self._shift else bits
                stored[piece], part = self._codec.encode(
                    ctx.framework, self._master[piece], dtype, bits
                )
                if aux is not None:
                    aux[piece] = part
        _write_where(ctx.flag, self._stored, stored)
        if aux is not None:
            _write_where(ctx.flag, self._aux, aux)


DTYPE_OF_SLOTS = getattr(torch, SLOT_DTYPE)
# In elements.
_PIECE = 2**17


class RandomBits:
    """The random bits of a chunk's elements; see `codecs.random_bits`."""

    def __init__(self, positions, variables, shards):
        self._sizes = list(map(torch.Tensor.numel, shards))
        starts = itertools.accumulate(self._sizes[:-1], initial=0)
        places = map(operator.sub, map(first_index, variables), starts)
        numbers = [
            *(codecs.int32(position * codecs.WEIGHTS) for position in positions),
            *(codecs.int32(place * codecs.PLACES) for place in places),
        ]
        # The numbers travel as arguments of kernels: a copy would synchronise.
        flat = shards[0].new_zeros(len(numbers), dtype=torch.int64)
        torch._foreach_add_(flat.unbind(), numbers)
        self._keys, self._shifts = flat.to(torch.int32).view(2, -1)

    def keys(self, iterations, offset):
        """Returns the key of each element, given the number of the step."""
        shift = codecs.int32(offset * codecs.WEIGHTS)
        keys = self._keys + iterations.to(torch.int32) + shift
        keys = codecs.hashed(keys) + self._shifts
        pairs = zip(keys.unbind(), self._sizes, strict=True)
        keys = [key.expand(size) for key, size in pairs]
        return torch.cat(keys) if len(keys) > 1 else keys[0]


def _write_where(flag, tensors, new):
    """Writes a flat tensor into tensors, bit for bit; where `flag`, if there is one."""
    if flag is not None:
        new = torch.where(flag, new, _flatten_dense_tensors(tensors))
    torch._foreach_copy_(tensors, _unflatten_dense_tensors(new, tensors))


def is_in_place(codec):
    """Whether the masters of a codec are updated as `StoredMasters`."""
    # These have the formulas of this class, not those of a subclass or another codec.
    return type(codec) is codecs.Float32


def masters_of(ctx, chunk, weights, aux):
    """Returns the masters of a chunk of 16-bit weights, for one step."""
    if is_in_place(chunk.codec):
        return StoredMasters(ctx, chunk, weights, aux)
    return DecodedMasters(ctx, chunk.codec, weights, aux, chunk.random_bits)


def masters_of_slots(ctx, chunk, slots, number):
    """Returns the masters of a chunk's slots with this number in their rule."""
    draw = draw_of_slot(0, number)
    return DecodedMasters(ctx, SLOT_CODEC, slots, [], chunk.random_bits, draw)


# --- Masters in float32 -------------------------------------------------------------
#
# A master whose weight was assigned is re-initialised, whether or not the step is
# applied. On the host each step compares all of them. On an accelerator that would take
# longer than the rest of the step. PyTorch counts the writes to a tensor, and only a
# chunk that others have written is compared. PyTorch does not count writes to
# `tensor.data`, by a collective of `torch.distributed`, or through another library's
# view of the same memory. After such a write, call
# `torch.autograd.graph.increment_version`.


def resynchronise(framework, chunk, weights, masters, memory):
    """Re-initialises the masters of a chunk whose weights were assigned externally."""
    if memory is None:
        versions = _versions_of([*masters, *weights])
        if versions is None or versions != chunk.written:
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


def _versions_of(tensors):
    """Returns what changes when others write tensors; None if unknown."""
    # A CUDA graph may be replayed after such a write. Shards, and copies in a
    # `StatelessScope`, are new tensors in each step.
    is_recorded = (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )
    if is_recorded or not all(
        isinstance(t, torch.nn.Parameter) and not t.is_inference() for t in tensors
    ):
        return None
    return [(t._version, t.data_ptr()) for t in tensors]


def _resynchronise_all(framework, masters, weights):
    # `Float32.decode` in fewer passes: no float32 copy of the weights.
    old, value = map(_flatten_dense_tensors, (masters, weights))
    new = torch.where(framework.rounded(old, value.dtype) == value, old, value)
    _write_where(None, masters, new)


def _round_where(ctx, masters, variables):
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


def without_memory(values):
    """See `Framework.without_memory`. All elements of a tensor share one NaN."""
    for tensor in values:
        _hold(tensor, lambda t: t.new_full((), torch.nan).expand(t.shape))
    return values


def allocate(tensors):
    """Gives tensors memory of their own."""
    for tensor in tensors:
        _hold(tensor, lambda t: t.new_empty(t.shape))


@torch.no_grad()
def _hold(tensor, new):
    if is_sharded(tensor):
        tensor._local_tensor = new(tensor._local_tensor)
    else:
        tensor.data = new(tensor)
