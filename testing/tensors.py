"""Tensors for tests: of dtypes that JAX may lack, transposed, or sparse."""

import keras
import numpy as np
import pytest
from keras import ops


def tensor(values, dtype="float32"):
    """A tensor of exactly this dtype; skips the test if the backend lacks it."""
    result = ops.convert_to_tensor(np.asarray(values, "float64"), dtype=dtype)
    if keras.backend.standardize_dtype(result.dtype) != dtype:
        pytest.skip(f"This backend has no {dtype} here (JAX: x64 is off)")
    return result


def numpy(values):
    """The elements of a tensor in float64."""
    if keras.backend.standardize_dtype(values.dtype) == "bfloat16":
        values = ops.cast(values, "float32")
    return ops.convert_to_numpy(values).astype("float64")


def number(value):
    """The value of a scalar tensor of any dtype."""
    return float(ops.convert_to_numpy(ops.cast(value, "float32")))


def transposed(values):
    """On PyTorch a view whose elements are not in memory order."""
    return ops.transpose(values, axes=tuple(range(len(values.shape)))[::-1])


def sparse_gradient(values, rows, shape):
    """A gradient with only some rows, one of which may occur twice."""
    return _OF_ROWS[keras.backend.backend()](values, rows, shape)


def _indexed_slices(values, rows, shape):
    import tensorflow as tf

    return tf.IndexedSlices(
        tf.convert_to_tensor(values), tf.constant(rows, "int64"), tf.constant(shape)
    )


def _bcoo(values, rows, shape):
    import jax.numpy as jnp
    from jax.experimental import sparse

    indices = jnp.asarray(rows)[:, None]
    return sparse.BCOO((jnp.asarray(values), indices), shape=shape)


def _sparse_coo(values, rows, shape):
    import torch

    values = torch.as_tensor(ops.convert_to_tensor(values))
    return torch.sparse_coo_tensor(torch.tensor([list(rows)]), values, tuple(shape))


_OF_ROWS = {"tensorflow": _indexed_slices, "jax": _bcoo, "torch": _sparse_coo}
