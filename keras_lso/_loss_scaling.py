"""Scaling the loss and unscaling gradients, and who has done which last."""

import keras

from keras_lso import backend


class LossScaling(keras.optimizers.Optimizer):
    """What a `LossScaleOptimizer` does before gradients are applied."""

    # None: nobody has scaled or unscaled anything yet.
    _gradients_are_scaled: bool | None = None
    # Whether `scale_loss` did, which Keras 3's trainers call, and last.
    _scaled_as_keras_does = False

    @property
    def loss_scale(self):
        """The current loss scale, a float32 scalar tensor."""
        return self.loss_scale_policy.value

    @property
    def loss_scale_factor(self):
        """None: the loss scale of a `LossScaleOptimizer` is its own."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value):
        if value is not None:
            raise ValueError(
                "LossScaleOptimizer scales the loss itself and has no "
                "`loss_scale_factor`. For a fixed scale write "
                f"`LossScaleOptimizer(inner_optimizer, dynamic=False, "
                f"initial_scale={value})`."
            )

    def scale_loss(self, loss):
        """Multiplies the loss by the loss scale.

        Args:
            loss: Tensor or number. A float16 loss is promoted to float32, in
                which no loss scale overflows.

        Returns:
            The scaled loss.
        """
        self._gradients_are_scaled = True
        self._scaled_as_keras_does = True
        return self._scaled(loss)

    def _scaled(self, loss):
        return backend.times(loss, self.loss_scale)

    def get_scaled_loss(self, loss):
        """Multiplies the loss by the loss scale; also takes a callable.

        Args:
            loss: Tensor, or callable that returns one.

        Returns:
            The scaled loss, or a callable that returns it.
        """
        self._gradients_are_scaled = True
        self._scaled_as_keras_does = False
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        return self._scaled(loss)

    def get_unscaled_gradients(self, grads):
        """Divides gradients of a scaled loss by the loss scale.

        `apply` takes the gradients for unscaled from here on, until the next
        loss is scaled. Variables that are overwritten with their gradients (float8
        scales) need the other way: hand `apply` the scaled gradients.

        Args:
            grads: List of tensors, dense or sparse. None passes through.

        Returns:
            A new list. What was narrower than float32 is float32 now: dividing
            in float16 would lose what loss scaling saved.
        """
        inv_scale = 1.0 / self.loss_scale
        grads = [backend.as_gradient(g) for g in grads]
        unscaled = [None if g is None else unscale(g, inv_scale) for g in grads]
        self._gradients_are_scaled = False
        self._scaled_as_keras_does = False
        return unscaled

    def _unscaled(self, grads):
        return self.get_unscaled_gradients(grads)

    @property
    def _has_scaled(self):
        """Whether a loss was scaled, or a gradient unscaled, by this object."""
        return self._gradients_are_scaled is not None

    def _inv_scale(self, scaled=None):
        """Returns what unscales the gradients that `apply` would take now.

        Args:
            scaled: See `apply`. Defaults to `None`.

        Returns:
            `1 / loss_scale`, a float32 scalar tensor; 1.0 if they are not scaled.
        """
        return 1.0 / self.loss_scale if self._are_scaled(scaled) else 1.0

    def _are_scaled(self, scaled):
        # Keras's trainers scale, and so does who has said nothing.
        return self._gradients_are_scaled is not False if scaled is None else scaled


def unscale(grad, inv_scale):
    # Not a division: it takes twice as long in XLA's Adam, and is the same for the
    # powers of two that loss scales are.
    return backend.map_values(lambda v: backend.times(v, inv_scale), grad)
