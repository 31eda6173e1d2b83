"""The float32 numbers of 16-bit weights on an accelerator, in few passes over memory.

The classes here return the same results as those of `masters.py` do on the host. Only
the part kept with a NaN may differ, since any value there makes a NaN again.

On an accelerator, each operation is a pass over the device's memory, and the host must
not read a tensor. `finite` is a boolean scalar tensor. Where it is False, nothing
changes. To save passes,

- operations take 16-bit and 32-bit tensors together, and widen the former on reading,
- the lower and upper halves of 32-bit elements are 16-bit tensors too (`_halves`),
- a shift or a mask that only selects a half costs no operation.
"""

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso._backend import masters
from keras_lso._backend.tensors import FLOAT16_MAX
from keras_lso._backend.torch import in_step as torch_in_step
from keras_lso._backend.torch.kernels import copy_unless

# Bits of float16: the exponent mask, and the exponents of 2**-14 and 65504.
_EXPONENT, _SMALLEST, _LARGEST = 0x7C00, 0x0400, 0x7800
# A sum of this and an integer of up to 22 bits ends with the bits of the integer.
_INTEGERS = 1.5 * 2.0**23
# The upper half of `masters.LARGEST_BFLOAT16`.
_LARGEST_BFLOAT16 = 0x7F7F


class _Numbers:
    """Numbers that exist during one step, in one tensor; see `InPlaceNumbers`."""

    def __init__(self, framework, chunk, memory, finite):
        self._chunk, self._finite = chunk, finite
        self._is_float16 = chunk.variables[0].dtype == torch.float16
        self._flat = self._joined()
        self.tensors = _unflatten_dense_tensors(self._flat, chunk.variables)

    def _joined(self):
        """Returns the numbers that a step begins with, a flat tensor."""
        raise NotImplementedError

    def _write_weights(self, new, found_inf):
        """Writes a flat tensor into the weights."""
        weights = self._chunk.variables
        if all(w.is_contiguous() for w in weights):
            copy_unless(found_inf, weights, _unflatten_dense_tensors(new, weights))
        else:
            self._write(weights, _flatten_dense_tensors(weights), new)

    def _write(self, tensors, old, new):
        """Writes `new` into `tensors`, which hold `old`, if `finite`, bit for bit."""
        kept = torch.where(self._finite, new, old)
        torch._foreach_copy_(tensors, _unflatten_dense_tensors(kept, tensors))


class RemainderNumbers(_Numbers):
    """Numbers of weights and 16-bit remainders."""

    def _joined(self):
        weight = _flatten_dense_tensors(self._chunk.variables)
        self._kept = [n.kept for n in self._chunk.narrow]
        self._low = low = _flatten_dense_tensors(self._kept)
        if self._is_float16:
            # Subtracted from 0, so that a remainder of 0 keeps a weight of -0.0.
            zero = _number(0.0, weight)
            lost = torch.addcmul(zero, low, _power(weight), value=-1.0)
            return torch.sub(weight, lost, alpha=2.0**-25)
        self._pairs = [(n.kept, n.weight) for n in self._chunk.narrow]
        if not torch_in_step.are_known(self._pairs):
            # Perhaps 0 was assigned to a weight: see `masters.Remainder`.
            low = low.masked_fill(weight.eq(0).logical_and_(low.lt(0)), 0)
        shift = torch.full((1,), 2**16, dtype=torch.int32, device=low.device)
        return torch.addcmul(low, weight.view(torch.int16), shift).view(torch.float32)

    def write(self, found_inf, iterations):
        numbers = self._flat
        low, _ = _halves(numbers)
        if self._is_float16:
            weight = numbers.clamp_(-FLOAT16_MAX, FLOAT16_MAX).half()
            numbers.sub_(weight)
            # The sum has the rounded quotient in its last bits.
            one = _number(_INTEGERS, numbers)
            torch.addcdiv(one, numbers, _power(weight), value=2.0**25, out=numbers)
            self._write(self._kept, self._low, low)
            self._write_weights(weight, found_inf)
            return
        self._write(self._kept, self._low, low)
        # A tie now rounds to the upper neighbour.
        low.clamp_min_(1 - 2**15)
        self._write_weights(numbers.bfloat16(), found_inf)
        torch_in_step.note(self._pairs, self._finite)


class StochasticNumbers(_Numbers):
    """Numbers of weights alone, rounded up with the probability of their remainders."""

    def _joined(self):
        weights = self._chunk.variables
        size = sum(map(torch.Tensor.numel, weights))
        flat = weights[0].new_empty(size, dtype=torch.float32)
        torch._foreach_copy_(_unflatten_dense_tensors(flat, weights), weights)
        return flat

    def write(self, found_inf, iterations):
        draw = self._drawn_float16 if self._is_float16 else self._drawn_bfloat16
        bits = _random_bits(self._chunk.draws, iterations)
        self._write_weights(draw(bits), found_inf)

    def _drawn_bfloat16(self, bits):
        _, unused = _halves(bits)
        unused.zero_()
        _, up = _halves(bits.add_(self._flat.view(torch.int32)))
        _, upper = _halves(self._flat)
        # Infinities and NaNs stay as they are, and no number becomes one.
        is_within = torch.bitwise_and(upper, 2**15 - 1).lt(_LARGEST_BFLOAT16)
        nearest = self._flat.bfloat16().view(torch.int16)
        return torch.where(is_within, up, nearest).view(torch.bfloat16)

    def _drawn_float16(self, bits):
        # Keep three of the four bytes.
        bits.view(torch.int8).view(-1, 4)[:, 3].zero_()
        numbers = self._flat.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
        exponents = torch.bitwise_and(numbers.view(torch.int32), masters.EXPONENT)
        power = exponents.clamp_min_(masters.SMALLEST_FLOAT16).view(torch.float32)
        zero = _number(0.0, numbers)
        quotient = torch.addcdiv(zero, numbers, power, value=2.0**10)
        below = torch.floor(quotient)
        remainder = quotient.sub_(below).mul_(2.0**24)
        below.add_(bits.lt(remainder))
        new = torch.empty_like(numbers, dtype=torch.float16)
        return torch.addcmul(zero, below, power, value=2.0**-10, out=new)


# Keyed by the class of the kind.
NUMBERS = {
    masters.Remainder: RemainderNumbers,
    masters.Stochastic: StochasticNumbers,
}


def _random_bits(draws, iterations):
    """Returns a flat int32 tensor of the bits of `masters.random_bits`."""
    positions, starts, sizes = draws.on_device()
    keys = _hashed(positions + iterations.to(torch.int32)).add_(starts)
    # From place to place the bits grow by `PLACES`. Where a weight begins, they grow by
    # the difference of the keys as well. An empty weight may need the extra element.
    steps = torch.full_like(keys[:1], masters.PLACES).repeat(draws.size + 1)
    more = torch.cat([keys[:1] - masters.PLACES, keys.diff()])
    steps.index_add_(0, sizes.cumsum(0) - sizes, more)
    bits = steps[: draws.size].cumsum(0, dtype=torch.int32)
    return _hashed(bits)


def _hashed(bits):
    """Implements `masters.hashed`, in place."""
    low, upper = _halves(bits)
    low.bitwise_xor_(upper)
    bits.mul_(masters.FACTORS[0])
    bits.bitwise_xor_(torch.bitwise_right_shift(bits, 15).bitwise_and_(2**17 - 1))
    bits.mul_(masters.FACTORS[1])
    low.bitwise_xor_(upper)
    return bits


def _halves(flat):
    """Returns the lower and the upper 16 bits of 32-bit elements, as two views.

    The lower half comes first, as on any machine for which PyTorch supports GPUs.
    """
    return flat.view(torch.int16).view(-1, 2).unbind(1)


def _power(weight):
    """Returns 2**10 units in the last place of float16 weights, in float16."""
    exponents = torch.bitwise_and(weight.view(torch.int16), _EXPONENT)
    return exponents.clamp_(_SMALLEST, _LARGEST).view(torch.float16)


def _number(value, like):
    """Returns a float32 tensor of one element, which widens the other operands."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)
