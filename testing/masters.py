"""Helpers for tests of 16-bit weights and their masters."""

import ml_dtypes
import numpy as np

from keras_lso._backend.masters import KINDS
from keras_lso._backend.targets import Narrow, Targets

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def targets_of(variables, slots, weights=None, kind="float32"):
    """Returns `Targets` of masters, or of the variables that another kind keeps."""
    if weights is None:
        return Targets(variables, slots)
    narrow = [
        None if w is None else Narrow(KINDS[kind], w, v, i)
        for i, (v, w) in enumerate(zip(variables, weights, strict=True))
    ]
    pairs = zip(variables, narrow, strict=True)
    written = [v if n is None else n.weight for v, n in pairs]
    return Targets(written, slots, narrow, positions=list(range(len(written))))


# Reference formulas in NumPy, with which those of the package are compared.


def split(numbers, dtype):
    """Returns the weights and the remainders of an array of float32 numbers."""
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        low = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
        upper = (bits >> 16).astype(np.uint16) + (low < 0)
        return upper.astype(np.uint16).view(ml_dtypes.bfloat16), low
    weights = numbers.astype(np.float16)
    difference = numbers.astype(np.float64) - weights.astype(np.float64)
    # The quotient is exact, and its product is rounded to float32.
    quotient = (difference / unit_of(weights)).astype(np.float32)
    low = np.rint(quotient * np.float32(2.0**15 - 1))
    return weights, low.astype(np.int16)


def unit_of(weights):
    """Returns the unit in the last place of float16 numbers, in float64."""
    magnitudes = np.maximum(np.abs(weights.astype(np.float64)), 2.0**-14)
    return 2.0 ** (np.floor(np.log2(magnitudes)) - 10)


def numbers_of(dtype, shape, seed=0):
    """Returns random float32 numbers in the range of float16, whole or split."""
    random = np.random.default_rng(seed)
    exponents = random.integers(-14, 15, size=shape)
    numbers = np.float32(random.uniform(1, 2, size=shape) * 2.0**exponents)
    numbers = np.asarray(numbers * random.choice([-1, 1], size=shape), np.float32)
    return numbers if dtype == "float32" else split(numbers, dtype)


def hashed(x):
    """Returns the hash "lowbias32" of uint32 numbers."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
