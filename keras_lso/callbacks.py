"""Callbacks of Keras that need to know of the optimizers here."""

import contextlib

import keras


class SwapEMAWeights(keras.callbacks.SwapEMAWeights):
    """`keras.callbacks.SwapEMAWeights` for models with float32 master weights.

    It evaluates the model with the averages of its weights, which an optimizer with
    `use_ema=True` keeps, and then goes back. Keras's own callback swaps what the
    inner optimizer trains. In a model under the `"float16"` policy those are the
    masters, of which the model's variables, the rounded ones, would hear nothing.
    This one rounds them into the model each time. Without masters it is Keras's own.

    Args:
        swap_on_epoch: Bool. Whether to swap at the end of each epoch and back at the
            beginning of the next, so that a `ModelCheckpoint` that comes after it
            saves the averages. Defaults to `False`.

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

    def on_epoch_begin(self, epoch, logs=None):
        with self._in_step():
            super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        with self._in_step():
            super().on_epoch_end(epoch, logs)

    def on_test_begin(self, logs=None):
        with self._in_step():
            super().on_test_begin(logs)

    def on_test_end(self, logs=None):
        with self._in_step():
            super().on_test_end(logs)

    def on_predict_begin(self, logs=None):
        with self._in_step():
            super().on_predict_begin(logs)

    def on_predict_end(self, logs=None):
        with self._in_step():
            super().on_predict_end(logs)

    def _in_step(self):
        scope = getattr(self.model.optimizer, "masters_in_step", None)
        return contextlib.nullcontext() if scope is None else scope()
