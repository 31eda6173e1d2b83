"""`SwapEMAWeights`: Keras's callback, for models with master weights."""

from typing import Any

import keras

from keras_lso._keras_internals.optimizers import averages_of, keeps_averages
from keras_lso.callbacks.swapped_weights import Pairs, SwappedInEvaluations, forget


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
        forget(self.model.optimizer)

    def _others(self, optimizer: keras.Optimizer) -> Pairs:
        if not keeps_averages(optimizer):
            raise ValueError(
                "SwapEMAWeights must be used when `use_ema=True` is set on the "
                f"optimizer. Received: optimizer={optimizer!r}"
            )
        return averages_of(optimizer)
