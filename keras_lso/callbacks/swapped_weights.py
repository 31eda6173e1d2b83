"""Swaps other values into a model's weights, and restores the weights."""

import contextlib
import weakref
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import check_bool
from keras_lso._keras_internals.optimizers import variables_of

# Trained variables, with a value for each.
Pairs = list[tuple[keras.Variable, Any]]


class _Swapped(NamedTuple):
    """The weights that a model trains with, while it holds others."""

    weights: Pairs
    # That of the others. If it differs, weights were loaded or trained meanwhile.
    fingerprint: list[Any]
    in_evaluation: bool


# By module, since the next `fit` or evaluation may use another callback.
_swapped: weakref.WeakKeyDictionary[keras.Optimizer, _Swapped] = (
    weakref.WeakKeyDictionary()
)


def forget(optimizer: keras.Optimizer) -> None:
    """Lets the optimizer's model train on from the other weights, if it holds them."""
    _swapped.pop(optimizer, None)


class SwappedInEvaluations(keras.callbacks.Callback):
    """A callback with which a model has other weights in each evaluation.

    An evaluation that ends with an error leaves the other weights in the model. The
    next `fit` or evaluation with such a callback then finds the weights to restore.
    """

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch: bool = check_bool("swap_on_epoch", swap_on_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        _go_on(self.model.optimizer)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        _go_on(self.model.optimizer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # No exception for the last epoch: `fit` ends with the other weights.
        if self.swap_on_epoch:
            self._swap(in_evaluation=False)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        if optimizer in _swapped and _swapped[optimizer].in_evaluation:
            _put_back(optimizer)

    on_predict_begin = on_test_begin
    on_predict_end = on_test_end

    def _others(self, optimizer: keras.Optimizer) -> Pairs:
        """Returns the trained variables and their other weights, or raises an error."""
        raise NotImplementedError

    def _swap(self, in_evaluation: bool = True) -> None:
        """Puts the other weights into the model, unless they are there already."""
        optimizer = self.model.optimizer
        if _is_swapped(optimizer):
            return
        with _in_step(optimizer):
            pairs = self._others(optimizer)
            # Copies: on PyTorch a variable changes in place, and on JAX aliasing with
            # the value would let the training step donate one buffer twice.
            weights = [(variable, ops.copy(variable)) for variable, _ in pairs]
            for variable, value in pairs:
                variable.assign(ops.copy(value))
        if weights:
            fingerprint = _fingerprint(optimizer)
            _swapped[optimizer] = _Swapped(weights, fingerprint, in_evaluation)


def _go_on(optimizer):
    """Restores the trained weights, to train on."""
    if _is_swapped(optimizer):
        _put_back(optimizer)


def _put_back(optimizer):
    with _in_step(optimizer):
        for variable, value in _swapped.pop(optimizer).weights:
            variable.assign(value)


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
