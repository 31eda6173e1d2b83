"""`backend.xp`: the functions of tensors that rules and steps call, of `keras.ops`.

A backend may have its own module with these names. On PyTorch they also take `Tensors`.
"""

import functools
from collections.abc import Callable

from keras import ops

from keras_lso._backend.tensors import Tensor

abs = ops.abs
cast = ops.cast
clip = ops.clip
copy = ops.copy
logical_and = ops.logical_and
logical_not = ops.logical_not
logical_or = ops.logical_or
logical_xor = ops.logical_xor
maximum = ops.maximum
ones_like = ops.ones_like
reciprocal = ops.reciprocal
sign = ops.sign
sqrt = ops.sqrt
square = ops.square
where = ops.where
zeros_like = ops.zeros_like


def all_finite(scalars: list[Tensor]) -> Tensor:
    """Returns whether all scalar tensors are finite."""
    return functools.reduce(ops.logical_and, map(ops.isfinite, scalars))


def amax(x: Tensor) -> Tensor:
    """Returns the largest number of each row, as a last axis of one number."""
    return ops.max(x, axis=-1, keepdims=True)


def average(old: Tensor, new: Tensor, beta: Tensor) -> Tensor:
    """Returns the average `beta * old + (1 - beta) * new`, rounded as in Keras."""
    # On PyTorch Keras rounds differently, and so does `torch/xp.py`.
    return old + (new - old) * (1 - beta)


def each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns a function of a whole tensor; on PyTorch, of each in a list."""
    return function(x)
