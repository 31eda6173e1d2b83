"""Tensors of a dtype that JAX may not have."""

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
