"""Callbacks that swap other values into a model's weights, and restore them."""

import abc
import contextlib
import weakref
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import check_bool
from keras_lso._keras_internals.optimizers import keeps_averages, variables_of
from keras_lso._keras_internals.state import (
    averages_of,
    schedule_free_averages_of,
    schedule_free_in,
)

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


class SwappedInEvaluations(keras.callbacks.Callback, abc.ABC):
    """A callback with which a model has other weights in each evaluation.

    An evaluation that ends with an error leaves the other weights in the model. The
    next `fit` or evaluation with such a callback then finds the weights to restore.
    """

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch: bool = check_bool("swap_on_epoch", swap_on_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        _train_on(self.model.optimizer)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        _train_on(self.model.optimizer)

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

    @abc.abstractmethod
    def _other_weights(self, optimizer: keras.Optimizer) -> Pairs:
        """Returns the trained variables and their other weights, or raises an error."""

    def _swap(self, in_evaluation: bool = True) -> None:
        """Puts the other weights into the model, unless they are there already."""
        optimizer = self.model.optimizer
        if _is_swapped(optimizer):
            return
        with _in_step(optimizer):
            pairs = self._other_weights(optimizer)
            # Copies: on PyTorch a variable changes in place, and on JAX aliasing with
            # the value would let the training step donate one buffer twice.
            weights = [(variable, ops.copy(variable)) for variable, _ in pairs]
            for variable, value in pairs:
                variable.assign(ops.copy(value))
        if weights:
            fingerprint = _fingerprint(optimizer)
            _swapped[optimizer] = _Swapped(weights, fingerprint, in_evaluation)


def _train_on(optimizer: keras.Optimizer) -> None:
    """Restores the trained weights if others are swapped in."""
    if _is_swapped(optimizer):
        _put_back(optimizer)


def _put_back(optimizer: keras.Optimizer) -> None:
    """Restores the trained weights."""
    with _in_step(optimizer):
        for variable, value in _swapped.pop(optimizer).weights:
            variable.assign(value)


def _is_swapped(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer's model still holds the other weights."""
    swapped = _swapped.get(optimizer)
    if swapped is None:
        return False
    to_host = backend.host.to_host
    sums = zip(swapped.fingerprint, _fingerprint(optimizer), strict=True)
    if all(np.array_equal(to_host(a), to_host(b)) for a, b in sums):
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
    """Returns the context in which the optimizer's averages hold values."""
    masters = getattr(optimizer, "_masters", None)
    return contextlib.nullcontext() if masters is None else masters.in_step()


class SwapEMAWeights(SwappedInEvaluations, keras.callbacks.SwapEMAWeights):
    """`keras.callbacks.SwapEMAWeights` for models with master weights.

    It evaluates the model with the averages of its weights, which an optimizer with
    `use_ema=True` keeps, and then restores the weights. Under the dtype policy
    `"float16"` or `"bfloat16"` the averages are float32 averages of the masters. This
    callback rounds them into the model's variables, unlike Keras's own. It also finds
    the averages of an optimizer inside `LARC`, and restores the weights after `predict`
    too. Before the first applied step there are no averages, and nothing is swapped.
    After an error in an evaluation, the next `fit` or evaluation with this callback
    restores the weights.

    Args:
        swap_on_epoch: Whether to swap at the end of each epoch and restore the weights
            at the beginning of the next, so that a `ModelCheckpoint` that comes after
            it in the list of callbacks saves the averages. Defaults to `False`.

    Example:

    >>> import keras, keras_lso
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> inner = keras.optimizers.SGD(0.1, use_ema=True)
    >>> model.compile(keras_lso.LossScaleOptimizer(inner), loss="mse")
    >>> x = keras.ops.ones((4, 1))
    >>> averages = keras_lso.callbacks.SwapEMAWeights()
    >>> history = model.fit(
    ...     x, x, validation_data=(x, x), callbacks=[averages], verbose=0
    ... )

    Reference:

    - [keras.callbacks.SwapEMAWeights](
        https://keras.io/api/callbacks/swap_ema_weights/)
    """

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # Keras has ended `fit` with the averages, and the next one begins with them.
        _swapped.pop(self.model.optimizer, None)

    def _other_weights(self, optimizer: keras.Optimizer) -> Pairs:
        if not keeps_averages(optimizer):
            raise ValueError(
                "SwapEMAWeights must be used when `use_ema=True` is set on the "
                f"optimizer. Received: optimizer={optimizer!r}"
            )
        return averages_of(optimizer)


class SwapScheduleFreeWeights(SwappedInEvaluations):
    """Evaluates a model that `keras.optimizers.ScheduleFreeAdamW` trains.

    Schedule-free training computes gradients at one point, `y`, and its result is
    another point, `x`, the average that replaces a decaying learning rate. Keras's
    optimizer (since Keras 3.15) leaves the model at `y`. This callback computes `x`
    from `y` and from the optimizer's `momentum`, which is the paper's `z`:

    ```python
    x = (y - (1 - beta_1) * z) / beta_1
    ```

    The model has `x` during `evaluate`, `predict` and the validation of `fit`, and `y`
    again afterwards; after an error in one of them, only from the next `fit` or
    evaluation with this callback. From masters of float16 or bfloat16 weights, `x` is
    computed in float32, and rounded into the model's variables. The optimizer may be
    Keras's own, a member of a `MultiOptimizer`, or wrapped in `LossScaleOptimizer`,
    `GuardedOptimizer` or `LARC`.

    With `swap_on_epoch=True` the model ends with `x`, to be saved or used. The next
    `fit` with a `SwapScheduleFreeWeights` begins at `y` again, unless other weights
    were loaded meanwhile. In the list of callbacks, one that saves the model to resume
    training, such as `BackupAndRestore`, must come before this one, and one that saves
    the model for use, such as `ModelCheckpoint`, after it.

    Args:
        swap_on_epoch: Bool. Whether the model holds `x` from the end of each epoch to
            the beginning of the next, and at the end of `fit`. Defaults to `False`.

    Raises:
        ValueError: When `x` is computed, if no `ScheduleFreeAdamW` trains the model,
            or if its `beta_1` is 0.

    Example:

    >>> import keras, keras_lso
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> inner = keras.optimizers.ScheduleFreeAdamW(0.1)
    >>> model.compile(keras_lso.LossScaleOptimizer(inner), loss="mse")
    >>> x = keras.ops.ones((4, 1))
    >>> swap = keras_lso.callbacks.SwapScheduleFreeWeights(swap_on_epoch=True)
    >>> history = model.fit(
    ...     x, x, validation_data=(x, x), callbacks=[swap], verbose=0
    ... )

    Reference:

    - [Defazio et al., 2024, The Road Less Scheduled](
        https://arxiv.org/abs/2405.15682)
    """

    def _other_weights(self, optimizer: keras.Optimizer) -> Pairs:
        inner = schedule_free_in(optimizer)
        if not inner:
            raise ValueError(
                "SwapScheduleFreeWeights needs a model that a `keras.optimizers."
                "ScheduleFreeAdamW` trains. Leave the callback out, or compile the "
                "model with one: `LossScaleOptimizer(keras.optimizers."
                f"ScheduleFreeAdamW())`. Received: optimizer={optimizer!r}"
            )
        if not all(o.beta_1 for o in inner):
            raise ValueError(
                "With `beta_1=0` SwapScheduleFreeWeights cannot compute the average "
                "from the weights of a ScheduleFreeAdamW. Write `beta_1=0.9`. "
                "Received: beta_1=0.0"
            )
        return schedule_free_averages_of(optimizer)
