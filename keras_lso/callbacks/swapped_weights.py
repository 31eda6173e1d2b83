"""Swaps other values into a model's weights, and restores the weights.

Between epochs, after `fit`, and after an evaluation that an error interrupts, a model
may hold the other values. This module remembers whose model does. A callback cannot:
the next `fit`, or an evaluation, may use another one.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import variables_of

# Trained variables, with a value for each.
Pairs = list[tuple[keras.Variable, Any]]


class _Swapped(NamedTuple):
    """A model that holds other weights than those that it trains with.

    Attributes:
        weights: The weights that it trains with, for `put_back`.
        fingerprint: Fingerprint of the other weights. If the fingerprint differs,
            weights were loaded or trained meanwhile.
        in_evaluation: Whether the other weights are there only for an evaluation.
    """

    weights: Pairs
    fingerprint: list[Any]
    in_evaluation: bool


_swapped: weakref.WeakKeyDictionary[keras.Optimizer, _Swapped] = (
    weakref.WeakKeyDictionary()
)


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


def forget(optimizer: keras.Optimizer) -> None:
    """Lets the optimizer's model train on from the other weights, if it holds them."""
    _swapped.pop(optimizer, None)


class SwappedInEvaluations(keras.callbacks.Callback):
    """A callback with which a model has other weights in each evaluation.

    An evaluation that ends with an error leaves the other weights in the model. The
    next `fit` or evaluation with such a callback then finds the weights to restore.

    `_others` of a subclass returns pairs of the trained variables and their other
    weights, for `swap_in`.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._go_on()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._go_on()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap()

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    def _check(self, optimizer: keras.Optimizer) -> None:
        """Raises an error if the optimizer has no other weights."""
        raise NotImplementedError

    def _others(self, optimizer: keras.Optimizer) -> Pairs:
        raise NotImplementedError

    def _swap(self, in_evaluation: bool = True) -> None:
        """Puts the other weights into the model, unless they are there already."""
        optimizer = self.model.optimizer
        self._check(optimizer)
        if _is_swapped(optimizer):
            return
        weights = swap_in(optimizer, functools.partial(self._others, optimizer))
        if weights:
            fingerprint = _fingerprint(optimizer)
            _swapped[optimizer] = _Swapped(weights, fingerprint, in_evaluation)

    def _restore(self) -> None:
        """Restores the trained weights at the end of an evaluation."""
        optimizer = self.model.optimizer
        if optimizer in _swapped and _swapped[optimizer].in_evaluation:
            put_back(optimizer, _swapped.pop(optimizer).weights)

    def _go_on(self) -> None:
        """Restores the trained weights, to train on."""
        optimizer = self.model.optimizer
        if _is_swapped(optimizer):
            put_back(optimizer, _swapped.pop(optimizer).weights)


def _is_swapped(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer's model still holds the other weights."""
    swapped = _swapped.get(optimizer)
    if swapped is None:
        return False
    sums = zip(swapped.fingerprint, _fingerprint(optimizer), strict=True)
    if all(np.array_equal(*map(backend.to_host, pair)) for pair in sums):
        return True
    del _swapped[optimizer]
    return False


def _fingerprint(optimizer: keras.Optimizer) -> list[Any]:
    """Returns the sum of the bits of each variable, a list of integer scalar tensors.

    The host need not wait for them, as it would for the values. An integer sum does not
    depend on the order of the terms.
    """
    variables = variables_of(optimizer)
    numbers = (ops.cast(ops.convert_to_tensor(v), "float32") for v in variables)
    return [ops.sum(backend.bitcast(n, "int32")) for n in numbers]


def _in_step(optimizer: keras.Optimizer) -> contextlib.AbstractContextManager[Any]:
    scope = getattr(optimizer, "masters_in_step", None)
    return contextlib.nullcontext() if scope is None else scope()
