"""Helpers for tests of 16-bit weights and their masters."""

import ml_dtypes
import numpy as np
from keras import ops

from keras_lso._backend.codecs import CODECS, Codec
from keras_lso._backend.leaves import Leaf, Leaves

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def leaves_of(variables, slots, weights=None, codec="float32"):
    """Returns `Leaves` of variables, or of weights that a codec stores them with."""
    weights = weights or [None] * len(variables)
    leaves = [
        Leaf(v) if w is None else Leaf(w, CODECS[codec], v, i)
        for i, (v, w) in enumerate(zip(variables, weights, strict=True))
    ]
    return Leaves.of(leaves, slots)


# Codecs that the package does not have, as docs/extending.md describes them.


class Residual(Codec):
    """Keeps the rounding error in a dtype of floats."""

    def __init__(self, aux_dtype):
        self.aux_dtype = aux_dtype

    def decode(self, framework, stored, aux):
        return ops.cast(stored, "float32") + ops.cast(aux, "float32")

    def encode(self, framework, master, dtype, bits=None):
        stored = framework.rounded(master, dtype)
        return stored, self.aux_for(framework, stored, master)

    def aux_for(self, framework, stored, master):
        return master - ops.cast(stored, "float32")


class BitsBetween(Residual):
    """Keeps the difference between the bits of the number and those of the weight."""

    def decode(self, framework, stored, aux):
        bits = framework.bitcast(ops.cast(stored, "float32"), "int32")
        return framework.bitcast(bits + aux, "float32")

    def aux_for(self, framework, stored, master):
        pair = master, ops.cast(stored, "float32")
        bits, of_weight = (framework.bitcast(v, "int32") for v in pair)
        return bits - of_weight


class Dithered(Residual):
    """Keeps the rounding error in a few bits, which are rounded stochastically."""

    is_random = True

    def decode(self, framework, stored, aux):
        low = ops.cast(aux, "float32") * self.unit(stored.dtype)
        return super().decode(framework, stored, low)

    def encode(self, framework, master, dtype, bits=None):
        stored, low = super().encode(framework, master, dtype)
        chance = ops.cast(ops.bitwise_and(bits, 2**16 - 1), "float32") * 2.0**-16
        return stored, ops.cast(ops.floor(low + chance), "int32")

    def aux_for(self, framework, stored, master):
        low = super().aux_for(framework, stored, master)
        return low * (1 / self.unit(stored.dtype))

    @staticmethod
    def unit(dtype):
        """Of weights below 4, half a unit in the last place is 64 of these."""
        return 2.0**-15 if "bfloat16" not in str(dtype) else 2.0**-13


class Noisy(Codec):
    """A float32 master with a weight that is rounded stochastically."""

    aux_dtype, aux_is_master, is_random = "float32", True, True

    def decode(self, framework, stored, aux):
        wide = ops.cast(stored, "float32")
        is_in_sync = ops.abs(aux - wide) <= ops.maximum(ops.abs(wide), 1e-4) * 2.0**-7
        return ops.where(is_in_sync, aux, wide)

    def encode(self, framework, master, dtype, bits=None):
        return CODECS["stochastic"].encode(framework, master, dtype, bits)[0], master

    def aux_for(self, framework, stored, master):
        return master


OTHER_CODECS = {
    "residual, float32": Residual("float32"),
    "residual, float16": Residual("float16"),
    "residual, bfloat16": Residual("bfloat16"),
    "bits, int32": BitsBetween("int32"),
    "dithered, int8": Dithered("int8"),
    "noisy": Noisy(),
}


# Reference formulas in NumPy, with which those of the package are compared.


def split(numbers, dtype, kind="remainder"):
    """Returns the weights and the remainders of an array of float32 numbers."""
    is_short = kind == "remainder8"
    if is_short:
        numbers = shortened(numbers, dtype)
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        low = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
        upper = (bits >> 16).astype(np.uint16) + (low < 0)
        low = (low >> 8).astype(np.int8) if is_short else low
        return upper.astype(np.uint16).view(ml_dtypes.bfloat16), low
    weights = numbers.astype(np.float16)
    difference = numbers.astype(np.float64) - weights.astype(np.float64)
    # The quotient is exact, and its product is rounded to float32.
    quotient = (difference / unit_of(weights)).astype(np.float32)
    if is_short:  # Exact too.
        return weights, (quotient * 2**7).astype(np.int8)
    low = np.rint(quotient * np.float32(2.0**15 - 1))
    return weights, low.astype(np.int16)


def shortened(numbers, dtype):
    """Returns the nearest float32 numbers that have remainders of 8 bits."""
    if dtype == "bfloat16":
        bits = numbers.view(np.int32).astype(np.int64)
        sign, magnitude = bits & -(2**31), bits & (2**31 - 1)
        # An infinity is not nearer than the largest of them.
        near = np.minimum((magnitude + 2**7) // 2**8 * 2**8, 0x7F7F7F00)
        magnitude = np.where(magnitude < 0x7F7F8000, near, magnitude)
        return (sign | magnitude).astype(np.int32).view(np.float32)
    weights = numbers.astype(np.float16)
    steps = unit_of(weights) * 2.0**-7
    exact = np.rint(numbers.astype(np.float64) / steps) * steps
    return exact.astype(np.float32)


def unit_of(weights):
    """Returns the unit in the last place of float16 numbers, in float64."""
    magnitudes = np.maximum(np.abs(weights.astype(np.float64)), 2.0**-14)
    return 2.0 ** (np.floor(np.log2(magnitudes)) - 10)


def numbers_of(dtype, shape, seed=0, kind="remainder"):
    """Returns random float32 numbers in the range of float16, whole or split."""
    random = np.random.default_rng(seed)
    exponents = random.integers(-14, 15, size=shape)
    numbers = np.float32(random.uniform(1, 2, size=shape) * 2.0**exponents)
    numbers = np.asarray(numbers * random.choice([-1, 1], size=shape), np.float32)
    return numbers if dtype == "float32" else split(numbers, dtype, kind)


def hashed(x):
    """Returns the hash "lowbias32" of uint32 numbers."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
