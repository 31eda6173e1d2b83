"""Functions of scalars by PyTorch's own operations.

A function of `keras.ops` first looks at what its arguments are, which takes three times
as long as the operation on a scalar. These take tensors only, where `keras.ops` takes
more; what is not here is `keras.ops`'.
"""

import keras
import torch
from keras import ops


def __getattr__(name):
    return getattr(ops, name)


where = torch.where
clip = torch.clamp
maximum = torch.maximum
stack = torch.stack
zeros_like = torch.zeros_like
ones_like = torch.ones_like
logical_and = torch.logical_and
logical_or = torch.logical_or
logical_not = torch.logical_not


def convert_to_tensor(value, dtype=None):
    """Does what `keras.ops.convert_to_tensor` does, at once for a tensor."""
    if isinstance(value, keras.Variable):
        value = value.value
    if not isinstance(value, torch.Tensor):
        return ops.convert_to_tensor(value, dtype=dtype)
    return value if dtype is None else cast(value, dtype)


def cast(tensor, dtype):
    """Does what `keras.ops.cast` does."""
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, keras.backend.standardize_dtype(dtype))
    return tensor.to(dtype)


def copy(value):
    """Does what `keras.ops.copy` does."""
    return convert_to_tensor(value).clone()
