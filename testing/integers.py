"""What is right for each float32 number, in integers alone: no rounding can hide.

The arrays are JAX's under JAX, where `judged` compiles a function, and NumPy's
elsewhere. A number is given by its bits without the sign: the next one has 1 more.
Rounded, it lacks the last ones of them: `cut` says how many.
"""

import keras
import numpy as np
from keras import ops

ON_JAX = keras.backend.backend() == "jax"
if ON_JAX:
    import jax
    import jax.numpy as xp
else:
    xp = np

SIGN, NO_SIGN = -(2**31), 2**31 - 1
INFINITY = 0x7F800000
# The largest numbers of 16 bits, the smallest normal float16, and the first number that
# rounds to an infinity in bfloat16.
LARGEST = {"bfloat16": 0x7F7F0000, "float16": 0x477FE000}
NORMAL_FLOAT16, INFINITE_BFLOAT16 = 0x38800000, 0x7F7F8000
# The place of a number between its neighbours is in parts of their distance.
PARTS = 2**24


def judged(function):
    """A function of arrays, which takes tensors and NumPy's arrays."""
    if ON_JAX:
        return jax.jit(function)
    return lambda *values: function(*map(ops.convert_to_numpy, values))


@judged
def broadcast(*arrays):
    """Returns integer arrays of one shape."""
    return [array + sum(xp.zeros_like(other) for other in arrays) for array in arrays]


def neighbours(size, cut):
    """Returns the rounded numbers below and above, and the place between them."""
    exponent, significand = size >> 23, (size & 0x7FFFFF) | 0x800000
    # Below the smallest rounded number it lacks all bits.
    within = xp.clip(cut, 0, 23)
    below = xp.where(cut > 23, 0, (size >> within) << within)
    unit = xp.where(cut > 23, xp.clip(exponent + cut - 23, 0, 254) << 23, 1 << within)
    place = (significand << xp.clip(24 - cut, 0, 24)) & (PARTS - 1)
    place = xp.where(cut > 24, significand >> xp.clip(cut - 24, 0, 31), place)
    return below, below + unit, place


def nearest(size, cut, ties):
    """Returns the nearest rounded number: at a tie the one above, or the even one."""
    below, above, place = neighbours(size, cut)
    # The smallest rounded number is odd.
    is_odd = xp.where(cut < 23, (below >> xp.clip(cut, 0, 23)) & 1, cut == 23) == 1
    is_tie = (place == PARTS // 2) & (is_odd | (ties == "above"))
    return xp.where((place > PARTS // 2) | is_tie, above, below)


def cut_of(size, dtype):
    """Returns how many bits of a number a weight lacks."""
    if dtype == "bfloat16":
        return xp.full_like(size, 16)
    return 13 + xp.maximum((NORMAL_FLOAT16 >> 23) - (size >> 23), 0)


def held(size, kind, dtype):
    """Returns what a kind of master holds of a number, and the weight of that."""
    ties = "above" if kind != "float32" and dtype == "bfloat16" else "even"
    weight = nearest(size, cut_of(size, dtype), ties)
    if kind != "remainder8":
        return size, weight
    if dtype == "bfloat16":
        # The last remainder of the largest weight is followed by an infinity.
        number = xp.minimum(nearest(size, xp.full_like(size, 8), ties), 0x7F7F7F00)
    else:
        # A remainder is in units of the weight that the number rounds to.
        exponent = xp.maximum(weight, NORMAL_FLOAT16) >> 23
        number = nearest(size, 6 + exponent - (size >> 23), ties)
    return number, nearest(number, cut_of(number, dtype), ties)


def is_near(back, bits):
    """Whether a number is a multiple of 2**-39 that is within as much of another one.

    That one is below `2**-14`. Both have their signs here.
    """

    def multiple_of(bits):
        size = bits & NO_SIGN
        cut = (127 - 39 + 23) - (size >> 23)
        below, _, place = neighbours(size, cut)
        significand = (size & 0x7FFFFF) | 0x800000
        # One of 2**-38 is an even one.
        count = (significand >> xp.clip(cut, 0, 31)) << xp.clip(-cut, 0, 1)
        return count, (below == size) & (place == 0)

    (count, is_whole), (below, is_exact) = multiple_of(back), multiple_of(bits)
    more = count - below
    is_next = (more == 0) | (more == 1) | ((more == -1) & is_exact)
    return is_whole & is_next & ((back ^ bits) >= 0)


class Rounding:
    """How numbers are rounded at random: by how many of the draws away from 0."""

    def __init__(self, bits, dtype):
        self.size, self.sign = bits & NO_SIGN, bits & SIGN
        cut = cut_of(self.size, dtype)
        self.below, self.above, place = neighbours(self.size, cut)
        self.draws = 2**16 if dtype == "bfloat16" else PARTS
        self.away = place // (PARTS // self.draws)
        # Whether the place is no whole number of draws: it was rounded down.
        self.is_between = cut > 24
        # They are the last draws in bfloat16, and the first that go up in float16.
        self.are_last = (self.sign != 0) | (dtype == "bfloat16")
        self.edge = xp.where(self.are_last, self.draws - self.away, self.away)

    def is_weight(self, bits, size):
        """Whether the bits of a weight are of that size; a new 0 may have any sign."""
        is_new_zero = (size == 0) & (self.size != 0) & ((bits & NO_SIGN) == 0)
        return (bits == (size | self.sign)) | is_new_zero


def power(exponent):
    """Returns the power of two with an exponent, or the nearest one of float32."""
    return xp.ldexp(xp.float32(1), xp.clip(exponent, -126, 127))
