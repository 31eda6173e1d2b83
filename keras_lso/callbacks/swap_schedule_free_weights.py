"""`SwapScheduleFreeWeights`: evaluates the average of schedule-free training."""

import keras

from keras_lso._keras_internals.schedule_free import points_of, schedule_free_in
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

    def _others(self, optimizer: keras.Optimizer) -> Pairs:
        found = schedule_free_in(optimizer)
        if not found:
            raise ValueError(
                "SwapScheduleFreeWeights needs a model that a `keras.optimizers."
                "ScheduleFreeAdamW` trains. Leave the callback out, or compile the "
                "model with one: `LossScaleOptimizer(keras.optimizers."
                f"ScheduleFreeAdamW())`. Received: optimizer={optimizer!r}"
            )
        if not all(one.beta_1 for one in found):
            raise ValueError(
                "With `beta_1=0` SwapScheduleFreeWeights cannot compute the average "
                "from the weights of a ScheduleFreeAdamW. Write `beta_1=0.9`. "
                "Received: beta_1=0.0"
            )
        return [(p.variable, p.average()) for p in points_of(optimizer)]
