"""Tensors for tests, of dtypes that JAX may not have, and their numbers."""

import keras
import numpy as np
import pytest
from keras import ops


def tensor(values, dtype="float32"):
    """A tensor of exactly this dtype; a test of one that is not there is skipped."""
    result = ops.convert_to_tensor(np.asarray(values, "float64"), dtype=dtype)
    if keras.backend.standardize_dtype(result.dtype) != dtype:
        pytest.skip(f"This backend has no {dtype} here (JAX: x64 is off)")
    return result


def numpy(values):
    """Its elements in float64."""
    if keras.backend.standardize_dtype(values.dtype) == "bfloat16":
        values = ops.cast(values, "float32")
    return ops.convert_to_numpy(values).astype("float64")


def number(value):
    """The value of a scalar tensor of any dtype."""
    return float(ops.convert_to_numpy(ops.cast(value, "float32")))


def transposed(values):
    """On PyTorch a view, whose elements do not lie in their order."""
    return ops.transpose(values, axes=tuple(range(len(values.shape)))[::-1])
