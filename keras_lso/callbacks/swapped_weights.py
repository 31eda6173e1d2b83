"""Swaps other values into a model's weights, and restores the weights."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

# Trained variables, with a value for each.
Pairs = list[tuple[keras.Variable, Any]]


def swap_in(optimizer: keras.Optimizer, values: Callable[[], Pairs]) -> Pairs:
    """Assigns values to the variables that an optimizer trains, and to the model.

    Args:
        optimizer: The model's optimizer, which may keep masters.
        values: Callable that returns pairs of a variable and its new value. It is
            called in the context of a step, where the variables hold the masters.

    Returns:
        Pairs of the same variables and their previous values, for `put_back`.
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
    """Assigns the values that `swap_in` returned."""
    with _in_step(optimizer):
        for variable, value in weights:
            variable.assign(value)


class SwappedInEvaluations(keras.callbacks.Callback):
    """A callback with which a model has other weights in each evaluation.

    `_swap` of a subclass swaps them in, and keeps the pairs of `swap_in` as `_weights`.
    """

    _weights: Pairs | None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, without the weights of the current model."""
        return {**vars(self), "_weights": None}

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._weights = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap()

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    def _swap(self) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        if self._weights is not None:
            put_back(self.model.optimizer, self._weights)
            self._weights = None


def _in_step(optimizer: keras.Optimizer) -> contextlib.AbstractContextManager[Any]:
    scope = getattr(optimizer, "masters_in_step", None)
    return contextlib.nullcontext() if scope is None else scope()
