"""The float32 numbers of 16-bit weights and slots on PyTorch, for a whole chunk.

An object holds the numbers of a chunk during one step. Where `Pass.flag`, a boolean
scalar tensor, is False, nothing changes.
"""

import itertools
import operator

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso._backend import masters
from keras_lso._backend.targets import SLOT_DTYPE, SLOT_KIND, draw_of_slot
from keras_lso._backend.tensors import FLOAT16_MAX
from keras_lso._backend.torch.lists import copy_unless
from keras_lso._backend.torch.shards import first_index, is_sharded


class InPlaceNumbers:
    """Float32 masters, the numbers themselves: a step updates them in place."""

    def __init__(self, one, chunk, narrow):
        self._one, self._chunk, self._narrow = one, chunk, narrow
        resynchronise(one.framework, chunk, narrow, one.memory)
        self.tensors = [n.kept for n in narrow]

    def write(self):
        """Writes the weights and their kept parts."""
        masters, weights = self.tensors, [n.weight for n in self._narrow]
        if self._one.flag is not None:
            _round_where(self._one, masters, weights)
            self._chunk.written = _versions_of([*masters, *weights])
            return
        torch._foreach_copy_(weights, masters)
        if weights[0].dtype == torch.float16:
            torch._foreach_clamp_min_(weights, -FLOAT16_MAX)
            torch._foreach_clamp_max_(weights, FLOAT16_MAX)


class Numbers:
    """Numbers that exist during one step, in one flat tensor; see `InPlaceNumbers`."""

    # On the host the formulas run on pieces, which stay in the cache. `draw` is the
    # offset of the positions for random bits, and the shift of these.

    def __init__(self, one, kind, weights, kept, draws, draw=(0, 0)):
        self._one, self._kind, self._weights, self._kept = one, kind, weights, kept
        self._draws, (self._offset, self._shift) = draws, draw
        weights = _flatten_dense_tensors(self._weights)
        kept = _flatten_dense_tensors(self._kept) if self._kept else None
        size = weights.numel()
        length = _PIECE if one.is_on_host else max(size, 1)
        self._pieces = [slice(i, i + length) for i in range(0, size, length)]
        self._number = torch.empty_like(weights, dtype=torch.float32)
        with one.without_host():
            for piece in self._pieces:
                self._number[piece] = self._kind.number(
                    one.framework, weights[piece], None if kept is None else kept[piece]
                )
        self.tensors = list(_unflatten_dense_tensors(self._number, self._weights))

    def write(self):
        """See `InPlaceNumbers.write`."""
        dtype = self._weights[0].dtype
        weight = torch.empty_like(self._number, dtype=dtype)
        kept = None
        if self._kept:
            kept = torch.empty_like(weight, dtype=self._kept[0].dtype)
        with self._one.without_host():
            keys = None
            if self._kind.draws:
                keys = self._draws.keys(self._one.iterations, self._offset)
            for piece in self._pieces:
                bits = None
                if keys is not None:
                    bits = masters.drawn(self._one.framework, keys[piece], piece.start)
                    bits = bits >> self._shift if self._shift else bits
                weight[piece], part = self._kind.parts(
                    self._one.framework, self._number[piece], dtype, bits
                )
                if kept is not None:
                    kept[piece] = part
        _write_where(self._one.flag, self._weights, weight)
        if kept is not None:
            _write_where(self._one.flag, self._kept, kept)


DTYPE_OF_SLOTS = getattr(torch, SLOT_DTYPE)
# In elements.
_PIECE = 2**17


class Draws:
    """The random bits of a chunk's elements; see `masters.random_bits`."""

    def __init__(self, positions, variables, shards):
        self._sizes = list(map(torch.Tensor.numel, shards))
        starts = itertools.accumulate(self._sizes[:-1], initial=0)
        places = map(operator.sub, map(first_index, variables), starts)
        numbers = [
            *(masters.int32(position * masters.WEIGHTS) for position in positions),
            *(masters.int32(place * masters.PLACES) for place in places),
        ]
        # The numbers travel as arguments of kernels: a copy would synchronise.
        flat = shards[0].new_zeros(len(numbers), dtype=torch.int64)
        torch._foreach_add_(flat.unbind(), numbers)
        self._keys, self._shifts = flat.to(torch.int32).view(2, -1)

    def keys(self, iterations, offset):
        """Returns the key of each element, given the number of the step."""
        shift = masters.int32(offset * masters.WEIGHTS)
        keys = self._keys + iterations.to(torch.int32) + shift
        keys = masters.hashed(keys) + self._shifts
        pairs = zip(keys.unbind(), self._sizes, strict=True)
        keys = [key.expand(size) for key, size in pairs]
        return torch.cat(keys) if len(keys) > 1 else keys[0]


def _write_where(flag, tensors, new):
    """Writes a flat tensor into tensors, bit for bit; where `flag`, if there is one."""
    if flag is not None:
        new = torch.where(flag, new, _flatten_dense_tensors(tensors))
    torch._foreach_copy_(tensors, _unflatten_dense_tensors(new, tensors))


def is_in_place(kind):
    """Whether the masters of a kind are updated by `InPlaceNumbers`."""
    # It has the formulas of this class, not those of a subclass or of a similar kind.
    return type(kind) is masters.Float32


def numbers_of(one, chunk, narrow):
    """Returns the numbers of a chunk of 16-bit weights, for one step."""
    kind, weights = narrow[0].kind, [n.weight for n in narrow]
    if is_in_place(kind):
        return InPlaceNumbers(one, chunk, narrow)
    kept = [n.kept for n in narrow if n.kept is not None]
    return Numbers(one, kind, weights, kept, chunk.draws)


def numbers_of_slots(one, chunk, slots, number):
    """Returns the numbers of a chunk's slots with this number in their rule."""
    return Numbers(one, SLOT_KIND, slots, [], chunk.draws, draw_of_slot(0, number))


# --- Masters in float32 -------------------------------------------------------------
#
# A master whose weight was assigned is re-initialised, whether or not the step is
# applied. On the host each step compares all of them. On an accelerator that would take
# longer than the rest of the step. PyTorch counts the writes to a tensor, and only a
# chunk that others have written is compared. PyTorch does not count writes to
# `tensor.data`, by a collective of `torch.distributed`, or through another library's
# view of the same memory. After such a write, call
# `torch.autograd.graph.increment_version`.


def resynchronise(framework, chunk, narrow, memory):
    """Re-initialises the masters of a chunk whose weights were assigned externally."""
    masters, weights = [n.kept for n in narrow], [n.weight for n in narrow]
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
    # `Float32.number` in fewer passes: no float32 copy of the weights.
    old, value = map(_flatten_dense_tensors, (masters, weights))
    new = torch.where(framework.rounded(old, value.dtype) == value, old, value)
    _write_where(None, masters, new)


def _round_where(one, masters, variables):
    # In one buffer, which one kernel clamps.
    flat = variables[0].new_empty(sum(v.numel() for v in variables))
    new = _unflatten_dense_tensors(flat, variables)
    torch._foreach_copy_(new, masters)
    if flat.dtype == torch.float16:
        flat.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
    if all(v.is_contiguous() for v in variables):
        copy_unless(one.found_inf, variables, new)
    else:
        _write_where(one.flag, variables, flat)


# --- Stand-ins ----------------------------------------------------------------------


def without_memory(tensors):
    """See `Framework.without_memory`. All elements of a tensor share one NaN."""
    for tensor in tensors:
        _hold(tensor, lambda t: t.new_full((), torch.nan).expand(t.shape))
    return tensors


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
