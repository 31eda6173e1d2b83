"""Callbacks of Keras that need to know of the optimizers here."""

import contextlib

import keras
from keras import ops

from keras_lso import adapters


class SwapEMAWeights(keras.callbacks.SwapEMAWeights):
    """`keras.callbacks.SwapEMAWeights` for models with float32 master weights.

    It evaluates the model with the averages of its weights, which an optimizer with
    `use_ema=True` keeps, and then goes back. In a model under the `"float16"` policy
    the inner optimizer averages float32 masters, of which the model's variables are
    the rounded ones: the averages are rounded into the model as well. Keras's own
    callback does not know of that. It also finds the averages of an optimizer inside of
    `LARC`, and `predict` leaves the weights as they were.

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

    def __init__(self, swap_on_epoch=False):
        super().__init__(swap_on_epoch)
        self._has_swapped = False

    def on_epoch_begin(self, epoch, logs=None):
        if self.swap_on_epoch:
            self._put_in_weights()

    def on_epoch_end(self, epoch, logs=None):
        if not self.swap_on_epoch:
            return
        self._put_in_averages()
        if epoch == self.params["epochs"] - 1:
            # `fit` ends with the averages in place of the weights. They are there now.
            for variable, average in self._averages():
                average.assign(variable)

    def on_test_begin(self, logs=None):
        self._put_in_averages()

    def on_test_end(self, logs=None):
        self._put_in_weights()

    def on_predict_begin(self, logs=None):
        self._put_in_averages()

    def on_predict_end(self, logs=None):
        self._put_in_weights()

    def _put_in_averages(self):
        if not self._has_swapped:
            self._swap()

    def _put_in_weights(self):
        if self._has_swapped:
            self._swap()

    def _swap(self):
        pairs = self._averages()
        with self._in_step():
            for variable, average in pairs:
                # On PyTorch a variable changes in place.
                before = ops.copy(variable)
                variable.assign(average)
                average.assign(before)
        self._has_swapped = not self._has_swapped

    def _averages(self):
        pairs = adapters.averages(self.model.optimizer)
        if not pairs:
            raise ValueError(
                "SwapEMAWeights must be used when `use_ema=True` is set on the "
                "optimizer, once it has trained or was built. Received: "
                f"optimizer={self.model.optimizer!r}"
            )
        return pairs

    def _in_step(self):
        scope = getattr(self.model.optimizer, "masters_in_step", None)
        return contextlib.nullcontext() if scope is None else scope()
