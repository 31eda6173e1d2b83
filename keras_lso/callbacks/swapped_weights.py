"""Other values in the place of a model's weights, and the weights back again."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

# What is trained, and a value for it.
Pairs = list[tuple[keras.Variable, Any]]


def swap_in(optimizer: keras.Optimizer, values: Callable[[], Pairs]) -> Pairs:
    """Assigns values to what an optimizer trains; the model has them afterwards.

    Args:
        optimizer: The model's optimizer, which may keep masters.
        values: Callable that returns pairs of a variable and its new value. It is
            called where the variables hold what is trained.

    Returns:
        The same with the values until now, for `put_back`.
    """
    with _in_step(optimizer):
        pairs = values()
        # Copies: on PyTorch a variable changes in place, and on JAX aliasing with
        # the value would let the training step donate one buffer twice.
        weights = [(variable, ops.copy(variable)) for variable, _ in pairs]
        for variable, value in pairs:
            variable.assign(ops.copy(value))
    return weights


def put_back(optimizer: keras.Optimizer, weights: Pairs) -> None:
    """Assigns what `swap_in` has returned."""
    with _in_step(optimizer):
        for variable, value in weights:
            variable.assign(value)


def _in_step(optimizer: keras.Optimizer) -> contextlib.AbstractContextManager[Any]:
    scope = getattr(optimizer, "masters_in_step", None)
    return contextlib.nullcontext() if scope is None else scope()
