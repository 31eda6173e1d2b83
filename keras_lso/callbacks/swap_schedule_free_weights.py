"""`SwapScheduleFreeWeights`: puts the average of schedule-free training in the model.

Between epochs and after `fit` the model may hold the average. This module remembers
whose model does. A callback cannot: the next `fit`, or an evaluation, may use another
one.
"""

import weakref
import zlib
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso._keras_internals.optimizers import variables_of
from keras_lso._keras_internals.schedule_free import points_of, schedule_free_in
from keras_lso.callbacks.swapped_weights import (
    Pairs,
    SwappedInEvaluations,
    put_back,
    swap_in,
)


class _Swapped(NamedTuple):
    """A model that holds the average.

    Attributes:
        weights: The weights that it trains with, for `put_back`.
        fingerprint: Fingerprint of the average in the model. If the fingerprint
            differs, other weights were loaded meanwhile.
    """

    weights: Pairs
    fingerprint: list[int]


_swapped: weakref.WeakKeyDictionary[keras.Optimizer, _Swapped] = (
    weakref.WeakKeyDictionary()
)


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
    again afterwards. If the optimizer keeps masters of float16 or bfloat16 weights,
    `x` is computed from the masters in float32, and rounded into the model's variables.
    The optimizer may be Keras's own, a member of a `MultiOptimizer`, or wrapped in
    `LossScaleOptimizer`, `GuardedOptimizer` or `LARC`.

    With `swap_on_epoch=True` the model ends with `x`, to be saved or used. To train on,
    pass this callback, or another `SwapScheduleFreeWeights`, to the next `fit`. Then
    training begins at `y` again, unless other weights were loaded meanwhile. In the
    list of callbacks, a callback that saves the model to resume training, such as
    `BackupAndRestore`, must come before this one, while the model holds `y`. A callback
    that saves the model for use, such as `ModelCheckpoint`, must come after it.

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

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch = swap_on_epoch
        # Pairs of a variable and its value, during an evaluation.
        self._weights: Pairs | None = None

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

    def _swap(self) -> None:
        optimizer = self.model.optimizer
        if self._weights is None and not _holds_average(optimizer):
            self._weights = _swap_in_average(optimizer)

    def _go_on(self) -> None:
        """Restores the trained weights if the model holds the average."""
        optimizer = self.model.optimizer
        if _holds_average(optimizer):
            put_back(optimizer, _swapped.pop(optimizer).weights)


def _holds_average(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer's model still holds the average of an epoch's end."""
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
    """Puts the average into the model; returns the weights that it trains with."""
    found = schedule_free_in(optimizer)
    if not found:
        raise ValueError(
            "SwapScheduleFreeWeights needs a model that a `keras.optimizers."
            "ScheduleFreeAdamW` trains, alone or within `LossScaleOptimizer`, "
            "`GuardedOptimizer`, `LARC` or a `MultiOptimizer`. Leave the callback out, "
            "or compile the model with one: `LossScaleOptimizer(keras.optimizers."
            f"ScheduleFreeAdamW())`. Received: optimizer={optimizer!r}"
        )
    for one in found:
        if not one.beta_1:
            raise ValueError(
                "With `beta_1=0` SwapScheduleFreeWeights cannot compute the average "
                "from the weights of a ScheduleFreeAdamW. Write `beta_1=0.9`. "
                f"Received: beta_1={one.beta_1!r}"
            )

    def averages() -> Pairs:
        return [(p.variable, p.average()) for p in points_of(optimizer)]

    return swap_in(optimizer, averages)
