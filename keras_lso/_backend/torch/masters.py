"""The float32 numbers of 16-bit weights on PyTorch, for a whole chunk in few kernels.

`NUMBERS` has a class for each kind of `../masters.py`. The classes implement the
formulas of the kinds, and are tested against them. An object holds the numbers of a
chunk during one step. On an accelerator, `device_masters.py` has two of the classes.

`finite` is a boolean scalar tensor. Where it is False, nothing changes. On the host it
is None, since a skipped step does not call this module.
"""

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso._backend import masters
from keras_lso._backend.masters import EXPONENT, SMALLEST_FLOAT16
from keras_lso._backend.tensors import FLOAT16_MAX
from keras_lso._backend.torch import device_masters as torch_device_masters
from keras_lso._backend.torch import in_step as torch_in_step
from keras_lso._backend.torch.kernels import copy_unless
from keras_lso._backend.torch.shards import is_sharded

# The buffers of `Memory`. The rules use the first two as well.
_FIRST, _SECOND, _NUMBERS = range(3)


class InPlaceNumbers:
    """Float32 masters, which are the numbers themselves: a step updates them in place.

    Args:
        framework: `Framework`.
        chunk: `Chunk`.
        memory: `Memory`; None on an accelerator.
        finite: See above.

    Attributes:
        tensors: List of float32 tensors, on which the rule steps.
    """

    def __init__(self, framework, chunk, memory, finite):
        self._pairs, self._finite = pairs_of(chunk), finite
        resynchronise(framework, self._pairs, finite, memory)
        self.tensors = chunk.numbers

    def write(self, found_inf, iterations):
        """Writes the weights and their kept parts after a step.

        Args:
            found_inf: Float32 scalar tensor, 1.0 where `finite` is False; None on the
                host.
            iterations: Integer scalar tensor, the number of the step, or None.
        """
        round_into_variables(self._pairs, self._finite, found_inf)


class _BufferedNumbers:
    """Numbers that exist during one step, in one buffer; see `InPlaceNumbers`."""

    def __init__(self, framework, chunk, memory, finite):
        self._chunk, self._memory = chunk, memory
        self._weights = chunk.variables
        self._kept = [n.kept for n in chunk.narrow]
        self._is_float16 = self._weights[0].dtype == torch.float16
        self._flat, self.tensors = self._new(_NUMBERS)
        torch._foreach_copy_(self.tensors, self._weights)
        self._begin()

    def _begin(self):
        """Turns the widened weights in the buffer into numbers."""

    def _new(self, number, dtype=torch.float32):
        """Returns a flat tensor, and views of it with the shapes of the weights."""
        flat = self._memory.flat(self._weights, number, dtype)
        return flat, self._memory.like(self._weights, number, dtype)

    def _unit_bits(self, values, out):
        """Writes the exponent bits of numbers: in float32, 2**10 float16 units."""
        torch.bitwise_and(values.view(torch.int32), EXPONENT, out=out)
        return out.clamp_min_(SMALLEST_FLOAT16)


class RemainderNumbers(_BufferedNumbers):
    """Numbers of weights and 16-bit remainders."""

    def _begin(self):
        if self._is_float16:
            units, _ = self._new(_FIRST, torch.int32)
            low, lows = self._new(_SECOND)
            torch._foreach_copy_(lows, self._kept)
            self._unit_bits(self._flat, units)
            # Subtracted from 0, so that a remainder of 0 keeps a weight of -0.0.
            torch.sub(torch.zeros_like(low[:1]), low, out=low)
            torch.mul(units.view(torch.float32), low, out=low)
            self._flat.sub_(low, alpha=2.0**-25)
            return
        low, lows = self._new(_SECOND, torch.int32)
        torch._foreach_copy_(lows, self._kept)
        bits = self._flat.view(torch.int32)
        bits.add_(low)
        if not self._flat.sum().isfinite():
            # Perhaps 0 was assigned to a weight: see `masters.Remainder`.
            is_zero = torch.bitwise_and(bits.sub_(low), 2**31 - 1) == 0
            low.masked_fill_(is_zero.logical_and_(low < 0), 0)
            bits.add_(low)

    def write(self, found_inf, iterations):
        if self._is_float16:
            self._write_float16()
            return
        bits = self._flat.view(torch.int32)
        low, lows = self._new(_SECOND, torch.int32)
        torch.bitwise_left_shift(bits, 16, out=low)
        low.bitwise_right_shift_(16)
        bits.sub_(low)
        torch._foreach_copy_(self._weights, self.tensors)
        torch._foreach_copy_(self._kept, lows)

    def _write_float16(self):
        self._flat.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
        rounded, new = self._new(_FIRST)
        narrow, _ = self._new(_SECOND, torch.float16)
        rounded.copy_(narrow.copy_(self._flat))
        differences = self._flat.sub_(rounded)
        low, lows = self._new(_SECOND, torch.int32)
        self._unit_bits(rounded, low)
        units = low.view(torch.float32)
        # The sum has the rounded quotient in its last bits.
        one = differences.new_full((1,), _INTEGERS)
        torch.addcdiv(one, differences, units, value=2.0**25, out=differences)
        low.copy_(differences.view(torch.int32)).sub_(_INTEGER_BITS)
        torch._foreach_copy_(self._weights, new)
        torch._foreach_copy_(self._kept, lows)


# A sum of this and an integer of up to 22 bits ends with the bits of the integer.
_INTEGERS, _INTEGER_BITS = 1.5 * 2.0**23, 0x4B400000


class StochasticNumbers(_BufferedNumbers):
    """Numbers of weights alone, rounded up with the probability of their remainders."""

    def write(self, found_inf, iterations):
        bits = self._random_bits(iterations)
        if self._is_float16:
            self._flat.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
            units, _ = self._new(_FIRST, torch.int32)
            unit = self._unit_bits(self._flat, units).view(torch.float32).mul_(2.0**-10)
            below = (self._flat / unit).floor_()
            chances = (bits & (2**24 - 1)).to(torch.float32).mul_(2.0**-24)
            below.add_(chances < self._flat / unit - below)
            torch.mul(below, unit, out=self._flat)
        else:
            exact = self._flat.view(torch.int32)
            up = bits.bitwise_and_(0xFFFF).add_(exact).bitwise_and_(-0x10000)
            # Infinities and NaNs stay as they are, and no number becomes one.
            is_within = self._flat.abs() <= masters.LARGEST_BFLOAT16
            exact.copy_(torch.where(is_within, up, exact))
        torch._foreach_copy_(self._weights, self.tensors)

    def _random_bits(self, iterations):
        """Returns a flat int32 tensor of the bits of `masters.random_bits`."""
        size = self._chunk.draws.size
        positions, starts, sizes = self._chunk.draws.on_device()
        keys = _hashed_(positions + iterations.to(torch.int32)).add_(starts)
        bits = torch.arange(size, dtype=torch.int32, device=keys.device)
        bits.mul_(masters.PLACES)
        if len(keys) > 1:
            keys = torch.repeat_interleave(keys, sizes, output_size=size)
        return _hashed_(bits.add_(keys))


def _hashed_(bits):
    """Implements `masters.hashed`, in place."""
    for count, factor in ((16, masters.FACTORS[0]), (15, masters.FACTORS[1]), (16, 1)):
        shifted = torch.bitwise_right_shift(bits, count)
        bits.bitwise_xor_(shifted.bitwise_and_(2 ** (32 - count) - 1))
        if factor != 1:
            bits.mul_(factor)
    return bits


# Keyed by the class of the kind.
NUMBERS = {
    masters.Float32: InPlaceNumbers,
    masters.Remainder: RemainderNumbers,
    masters.Stochastic: StochasticNumbers,
}


def numbers_of(framework, chunk, memory, finite):
    """Returns the numbers of a chunk of 16-bit weights, for one step."""
    classes = NUMBERS if finite is None else NUMBERS | torch_device_masters.NUMBERS
    return classes[type(chunk.narrow[0].kind)](framework, chunk, memory, finite)


# --- Masters in float32 -------------------------------------------------------------


def pairs_of(chunk):
    """Returns the pairs of a float32 master and its weight in a chunk."""
    return [(n.kept, n.weight) for n in chunk.narrow] if chunk.keeps_numbers else []


def resynchronise(framework, pairs, finite, memory):
    """Re-initialises the masters of variables that were assigned externally."""
    if finite is not None:
        if not torch_in_step.are_known(pairs):
            _resynchronise_where(framework, finite, pairs)
        return
    masters, variables = map(list, zip(*pairs, strict=True))
    expected = memory.like(variables)
    torch._foreach_copy_(expected, masters)
    for master, variable, value in zip(masters, variables, expected, strict=True):
        # `value` may differ from the rounded master, at -0.0 or beyond float16's range.
        # That is rare, and the formula then changes nothing.
        if not _are_alike(value, variable):
            master.copy_(framework.resynchronised(master, variable))


def _are_alike(values, others):
    """Whether two tensors have the same elements.

    `torch.equal` takes ten times as long for float16 as for int64 views, each of whose
    items covers four elements.
    """
    pair = values.reshape(-1), others.reshape(-1)
    if all(
        t.numel() and t.numel() % 4 == t.storage_offset() % 4 == 0 and t.is_contiguous()
        for t in pair
    ):
        pair = tuple(t.view(torch.int64) for t in pair)
    return torch.equal(*pair)


def _resynchronise_where(framework, finite, pairs):
    # `Framework.resynchronised` in fewer passes: no float32 copy of the variables.
    masters, variables = map(list, zip(*pairs, strict=True))
    old, value = map(_flatten_dense_tensors, (masters, variables))
    moved = (framework.rounded(old, value.dtype) != value).logical_and_(finite)
    new = torch.where(moved, value, old)
    torch._foreach_copy_(masters, _unflatten_dense_tensors(new, masters))


def round_into_variables(pairs, finite, found_inf):
    """Rounds the masters into the variables.

    `found_inf` is a float32 scalar tensor, 1.0 where `finite` is False; None on the
    host.
    """
    masters, variables = map(list, zip(*pairs, strict=True))
    if finite is not None:
        _round_where(finite, found_inf, masters, variables)
        torch_in_step.note(pairs, finite)
        return
    torch._foreach_copy_(variables, masters)
    if variables[0].dtype == torch.float16:
        for variable in variables:
            variable.clamp_(-FLOAT16_MAX, FLOAT16_MAX)


def _round_where(finite, found_inf, masters, variables):
    # In one buffer, which one kernel clamps.
    flat = variables[0].new_empty(sum(v.numel() for v in variables))
    new = _unflatten_dense_tensors(flat, variables)
    torch._foreach_copy_(new, masters)
    if flat.dtype == torch.float16:
        flat.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
    if all(v.is_contiguous() for v in variables):
        copy_unless(found_inf, variables, new)
    else:
        kept = torch.where(finite, flat, _flatten_dense_tensors(variables))
        torch._foreach_copy_(variables, _unflatten_dense_tensors(kept, variables))


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
