"""The kinds of masters in Triton's language: the formulas of `../../masters.py`.

All bits are equal, apart from those of a NaN. Only `kernels.py` imports this file,
which needs Triton.
"""

import triton
import triton.language as tl

from keras_lso._backend import masters
from keras_lso._backend.tensors import FLOAT16_MAX

_FLOAT16_MAX = tl.constexpr(FLOAT16_MAX)
_LARGEST_BFLOAT16 = tl.constexpr(masters.LARGEST_BFLOAT16)
_EXPONENT = tl.constexpr(masters.EXPONENT)
_SMALLEST_FLOAT16 = tl.constexpr(masters.SMALLEST_FLOAT16)
_UNIT_OF_FLOAT16 = tl.constexpr(-10 << masters.MANTISSA)
# A sum of this and an integer of up to 22 bits ends with the bits of the integer.
_INTEGERS, _INTEGER_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)
# Unsigned, so that a right shift does not copy the sign bit.
_FACTOR_1, _FACTOR_2, _PLACES, _WEIGHTS = (
    tl.constexpr(number % 2**32)
    for number in (*masters.FACTORS, masters.PLACES, masters.WEIGHTS)
)


@triton.jit
def _saturated(w):
    """Clips to the range of float16; a NaN stays one."""
    w = tl.where(w > _FLOAT16_MAX, _FLOAT16_MAX, w)
    return tl.where(w < -_FLOAT16_MAX, -_FLOAT16_MAX, w)


@triton.jit
def _unit(w):
    """Returns the unit in the last place of a float16 of a float32 number's size."""
    exponent = w.to(tl.int32, bitcast=True) & _EXPONENT
    exponent = tl.maximum(exponent, _SMALLEST_FLOAT16) + _UNIT_OF_FLOAT16
    return exponent.to(tl.float32, bitcast=True)


@triton.jit
def rounded(w, WEIGHT: tl.constexpr):
    """Rounds a number to a float dtype: `Framework.rounded`."""
    if tl.float16 == WEIGHT:
        w = _saturated(w)
    return w.to(WEIGHT)


# --- Remainders ---------------------------------------------------------------------


@triton.jit
def joined(weight, low, WEIGHT: tl.constexpr):
    """Returns the number of a weight and its remainder: `Remainder.number`."""
    low = low.to(tl.int32)
    if tl.float16 == WEIGHT:
        w = weight.to(tl.float32)
        # Negated twice: a remainder of 0 adds -0.0, which keeps a weight of -0.0.
        w = w + (-low).to(tl.float32) * -(_unit(w) * 2.0**-15)
    else:
        # Not a conversion, which may make a NaN whose bits are all ones. The sum would
        # then be no NaN.
        bits = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
        # No number has a weight of 0 and a negative remainder: 0 was assigned.
        low = tl.where(((bits & 0x7FFFFFFF) == 0) & (low < 0), 0, low)
        w = (bits + low).to(tl.float32, bitcast=True)
    return w


@triton.jit
def parts(w, WEIGHT: tl.constexpr):
    """Returns the weight and the remainder of a number: `Remainder.parts`."""
    if tl.float16 == WEIGHT:
        w = _saturated(w)
        weight = w.to(tl.float16)
        wide = weight.to(tl.float32)
        quotient = tl.div_rn(w - wide, _unit(wide)) * 2.0**15
        low = (quotient + _INTEGERS).to(tl.int32, bitcast=True) - _INTEGER_BITS
        low = tl.where(w == w, low, 0)
    else:
        bits = w.to(tl.int32, bitcast=True)
        # Otherwise a NaN whose bits are all ones would become a zero.
        low = tl.where(w == w, (bits << 16) >> 16, 0)
        weight = (bits - low).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return weight, low.to(tl.int16)


# --- Stochastic rounding ------------------------------------------------------------


@triton.jit
def drawn(w, bits, WEIGHT: tl.constexpr):
    """Rounds a number to one of its neighbours by random bits: `Stochastic.parts`."""
    if tl.float16 == WEIGHT:
        w = _saturated(w)
        unit = _unit(w)
        quotient = tl.div_rn(w, unit)
        # The quotient is 0 or at least 2**-125: `floor` takes smaller numbers for 0.
        below = tl.floor(quotient)
        chance = (bits & 0xFFFFFF).to(tl.float32) * 2.0**-24
        w = (below + (chance < quotient - below).to(tl.float32)) * unit
    else:
        exact = w.to(tl.uint32, bitcast=True)
        up = (exact + (bits & 0xFFFF)) & 0xFFFF0000
        # Infinities and NaNs stay as they are, and no number becomes one.
        w = tl.where(tl.abs(w) <= _LARGEST_BFLOAT16, up, exact)
        w = w.to(tl.float32, bitcast=True)
    return w.to(WEIGHT)


@triton.jit
def key_of(iterations, position, first_place):
    """Returns the key that a weight's random bits share; see `masters.random_bits`.

    `first_place` is the place of the kernel's first element in the whole weight.
    """
    key = iterations.to(tl.uint32) + position.to(tl.uint32) * _WEIGHTS
    return _hashed(key) + first_place.to(tl.uint32) * _PLACES


@triton.jit
def random_bits(key, places):
    """Returns the random bits for the places of a weight."""
    return _hashed(places.to(tl.uint32) * _PLACES + key)


@triton.jit
def _hashed(bits):
    bits = (bits ^ (bits >> 16)) * _FACTOR_1
    bits = (bits ^ (bits >> 15)) * _FACTOR_2
    return bits ^ (bits >> 16)
