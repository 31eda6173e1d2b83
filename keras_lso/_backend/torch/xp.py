"""The functions of `backend.xp` on PyTorch: of tensors, and of `Tensors`.

A function of `keras.ops` first inspects its arguments, which takes three times as long
as the operation. A number that a rule has for each tensor is one tensor with an element
for each.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import Tensor

from keras_lso._backend.torch.lists import Tensors

clip = torch.clamp
logical_and = torch.logical_and
logical_not = torch.logical_not
logical_or = torch.logical_or
logical_xor = torch.logical_xor
ones_like = torch.ones_like
reciprocal = torch.reciprocal
where = torch.where
zeros_like = torch.zeros_like


def all_finite(scalars: list[Tensor]) -> Tensor:
    """Returns whether scalars are finite. `torch.isfinite` takes four kernels."""
    # NaN for an inf and for a NaN.
    total = scalars[0] * 0
    for scalar in scalars[1:]:
        total = torch.add(total, scalar, alpha=0)
    return total == 0


def amax(x: Tensor) -> Tensor:
    """Returns the largest number of each row. Keras's function breaks graphs."""
    return x.amax(-1, keepdim=True)


def average(old: Any, new: Any, beta: Any) -> Any:
    """Returns `beta * old + (1 - beta) * new`, rounded as in Keras on PyTorch."""
    return old * beta + new * (1 - beta)


def copy(x: Tensor) -> Tensor:
    """Returns a copy."""
    return x.clone()


def cast(x: Any, dtype: Any) -> Any:
    """Casts a tensor; kernels round a number themselves, as Keras's on PyTorch do."""
    return x.to(dtype_named(dtype)) if torch.is_tensor(x) else x


@functools.cache
def dtype_named(dtype: Any) -> torch.dtype:
    """Returns the PyTorch dtype, given the dtype or its name."""
    return getattr(torch, keras.backend.standardize_dtype(dtype))


def each(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Returns a function of a tensor, or of each of `Tensors`."""
    return function(x) if torch.is_tensor(x) else Tensors(list(map(function, x.items)))


def _elementwise(of_tensor: Callable[..., Any], of_list: Callable[..., Any]) -> Any:
    """Returns a function of tensors, or of `Tensors`."""

    def function(x: Any, *others: Any) -> Any:
        if torch.is_tensor(x):
            return of_tensor(x, *others)
        return Tensors(of_list(x.items, *(other.items for other in others)))

    return function


abs = _elementwise(torch.abs, torch._foreach_abs)
maximum = _elementwise(torch.maximum, torch._foreach_maximum)
sign = _elementwise(torch.sign, torch._foreach_sign)
sqrt = _elementwise(torch.sqrt, torch._foreach_sqrt)
square = _elementwise(torch.square, lambda items: torch._foreach_mul(items, items))
