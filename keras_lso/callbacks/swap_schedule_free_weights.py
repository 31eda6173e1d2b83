"""`SwapScheduleFreeWeights`: evaluates the average of schedule-free training."""

from typing import Any

import keras

from keras_lso._core.checks import check_bool
from keras_lso._keras_internals.optimizers import (
    schedule_free_averages_of,
    schedule_free_in,
)
from keras_lso.callbacks.swapped_weights import Pairs, SwappedInEvaluations


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
    again afterwards. After an evaluation that an error interrupts, the model has `x`
    until the next `fit` or evaluation with this callback. If the optimizer keeps
    masters of float16 or bfloat16 weights, `x` is computed from the masters in float32,
    and rounded into the model's variables. The optimizer may be Keras's own, a member
    of a `MultiOptimizer`, or wrapped in `LossScaleOptimizer`, `GuardedOptimizer` or
    `LARC`.

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
        self.swap_on_epoch: bool = check_bool("swap_on_epoch", swap_on_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # No exception for the last epoch: `fit` ends with the average.
        if self.swap_on_epoch:
            self._swap(in_evaluation=False)

    def _check(self, optimizer: keras.Optimizer) -> None:
        found = schedule_free_in(optimizer)
        if not found:
            raise ValueError(
                "SwapScheduleFreeWeights needs a model that a `keras.optimizers."
                "ScheduleFreeAdamW` trains, alone or within `LossScaleOptimizer`, "
                "`GuardedOptimizer`, `LARC` or a `MultiOptimizer`. Leave the callback "
                "out, or compile the model with one: `LossScaleOptimizer(keras."
                f"optimizers.ScheduleFreeAdamW())`. Received: optimizer={optimizer!r}"
            )
        for one in found:
            if not one.beta_1:
                raise ValueError(
                    "With `beta_1=0` SwapScheduleFreeWeights cannot compute the "
                    "average from the weights of a ScheduleFreeAdamW. Write "
                    f"`beta_1=0.9`. Received: beta_1={one.beta_1!r}"
                )

    def _others(self, optimizer: keras.Optimizer) -> Pairs:
        return schedule_free_averages_of(optimizer)
