"""`SwapScheduleFreeWeights`: what schedule-free training is for, in the model.

Between epochs and after `fit` the model may hold the average. Which optimizer's does is
remembered here, apart from the callbacks: the next `fit`, or an evaluation, may come
with another one.
"""

import weakref
import zlib
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso._keras_internals.optimizers import variables_of
from keras_lso._keras_internals.schedule_free import points_of, schedule_free_in
from keras_lso.callbacks.swapped_weights import Pairs, put_back, swap_in


class _Swapped(NamedTuple):
    """A model that holds the average.

    Attributes:
        weights: What it trains with, for `put_back`.
        fingerprint: Of the weights that it was given: other weights may be loaded.
    """

    weights: Pairs
    fingerprint: list[int]


_swapped: weakref.WeakKeyDictionary[keras.Optimizer, _Swapped] = (
    weakref.WeakKeyDictionary()
)


class SwapScheduleFreeWeights(keras.callbacks.Callback):
    """Evaluates a model that `keras.optimizers.ScheduleFreeAdamW` trains.

    Schedule-free training takes its gradients at one point, `y`, and is for another
    one, `x`, the average that takes the place of a learning rate that decays. Keras's
    optimizer (since Keras 3.15) leaves the model at `y`. This callback computes `x` of
    `y` and of the optimizer's `momentum`, which is the paper's `z`:

    ```python
    x = (y - (1 - beta_1) * z) / beta_1
    ```

    The model has `x` during `evaluate`, `predict` and the validation of `fit`, and `y`
    again afterwards. Where the optimizer keeps masters of float16 or bfloat16 weights,
    `x` is computed of these in float32, and rounded into the model's variables. The
    optimizer may be Keras's own, a member of a `MultiOptimizer`, or within
    `LossScaleOptimizer`, `GuardedOptimizer` and `LARC`.

    With `swap_on_epoch=True` the model ends with `x`, to be saved or used. To train on,
    pass the callback, or another one of this class, to the next `fit`: it begins at
    `y` again, unless other weights were loaded meanwhile. What saves a model to resume
    training from it, such as `BackupAndRestore`, has to come before this callback in
    the list of callbacks, where the model holds `y`. What saves it to use it, such as
    `ModelCheckpoint`, comes after.

    Args:
        swap_on_epoch: Bool. Whether the model holds `x` from the end of each epoch to
            the beginning of the next, and at the end of `fit`. Defaults to `False`.

    Raises:
        ValueError: When `x` is to be computed, if no `ScheduleFreeAdamW` trains the
            model, or one with `beta_1=0`.

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

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch = swap_on_epoch
        # Pairs of a variable and its value, during an evaluation.
        self._weights: Pairs | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: all but the weights of the model at hand."""
        return {**vars(self), "_weights": None}

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._weights = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._weights = None
        self._go_on()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._go_on()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # No exception for the last epoch: `fit` ends with the average.
        optimizer = self.model.optimizer
        if self.swap_on_epoch and not _holds_average(optimizer):
            weights = _swap_in_average(optimizer)
            _swapped[optimizer] = _Swapped(weights, _fingerprint(optimizer))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap()

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    def _swap(self) -> None:
        optimizer = self.model.optimizer
        if self._weights is None and not _holds_average(optimizer):
            self._weights = _swap_in_average(optimizer)

    def _restore(self) -> None:
        if self._weights is not None:
            put_back(self.model.optimizer, self._weights)
            self._weights = None

    def _go_on(self) -> None:
        """Lets the model train where it did, if it holds the average."""
        optimizer = self.model.optimizer
        if _holds_average(optimizer):
            put_back(optimizer, _swapped.pop(optimizer).weights)


def _holds_average(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer's model still holds what the end of an epoch left in it."""
    swapped = _swapped.get(optimizer)
    if swapped is None:
        return False
    if swapped.fingerprint == _fingerprint(optimizer):
        return True
    del _swapped[optimizer]
    return False


def _fingerprint(optimizer: keras.Optimizer) -> list[int]:
    return [
        zlib.crc32(ops.convert_to_numpy(variable).tobytes())
        for variable in variables_of(optimizer)
    ]


def _swap_in_average(optimizer: keras.Optimizer) -> Pairs:
    """Gives the model the average; returns what it trains with."""
    found = schedule_free_in(optimizer)
    if not found:
        raise ValueError(
            "SwapScheduleFreeWeights needs a model that a `keras.optimizers."
            "ScheduleFreeAdamW` trains, by itself or within `LossScaleOptimizer`, "
            "`GuardedOptimizer`, `LARC` or a `MultiOptimizer`. Leave the callback out, "
            "or compile the model with one: `LossScaleOptimizer(keras.optimizers."
            f"ScheduleFreeAdamW())`. Received: optimizer={optimizer!r}"
        )
    for one in found:
        if not one.beta_1:
            raise ValueError(
                "With `beta_1=0` the weights of a ScheduleFreeAdamW hold nothing of "
                "the average that SwapScheduleFreeWeights is to compute. Write "
                f"`beta_1=0.9`. Received: beta_1={one.beta_1!r}"
            )

    def averages() -> Pairs:
        return [(p.variable, p.average()) for p in points_of(optimizer)]

    return swap_in(optimizer, averages)
