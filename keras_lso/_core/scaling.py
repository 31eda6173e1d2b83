"""Scaling a loss and unscaling gradients, and which of the two was done last."""

import enum

from keras_lso._backend import backend


class Gradients(enum.Enum):
    """What the gradients are that `apply` gets next."""

    UNKNOWN = "unknown"
    """No loss was scaled yet: taken for scaled, as Keras's trainers hand them over."""
    SCALED_BY_KERAS = "scaled by Keras"
    """`scale_loss` was called last, which Keras's trainers do."""
    SCALED = "scaled"
    """`get_scaled_loss` was called last."""
    UNSCALED = "unscaled"
    """`get_unscaled_gradients` was called last."""


class LossScaling:
    """Multiplies losses by the loss scale, and gradients by its inverse.

    Args:
        policy: The `LossScale` that holds the loss scale.

    Attributes:
        gradients: A `Gradients`. It is tied to no trace: a function that is traced
            again, or called once more, finds it as the last call left it.
    """

    def __init__(self, policy):
        self._policy = policy
        self.gradients = Gradients.UNKNOWN

    @backend.as_written
    def scale(self, loss):
        """Returns the loss times the loss scale, in float32 or wider."""
        return backend.times(loss, self._policy.value)

    @backend.as_written
    def unscale(self, grads):
        """Returns the gradients times the inverse of the loss scale; None stays."""
        inv_scale = 1.0 / self._policy.value
        grads = [backend.as_gradient(g) for g in grads]
        return [None if g is None else unscale(g, inv_scale) for g in grads]

    def are_scaled(self, scaled=None):
        """Whether the gradients are scaled that `apply(..., scaled=scaled)` gets."""
        return self.gradients is not Gradients.UNSCALED if scaled is None else scaled

    def inv_scale(self, scaled=None):
        """Returns what unscales those gradients: a float32 scalar tensor, or 1.0."""
        if not self.are_scaled(scaled):
            return 1.0
        return backend.scalars.reciprocal(self._policy.value)


def unscale(grad, inv_scale):
    """Returns a gradient, dense or sparse, times the inverse of a loss scale."""
    # Not a division: it takes twice as long in XLA's Adam, and is the same for the
    # powers of two that loss scales are.
    return backend.map_values(lambda v: backend.times(v, inv_scale), grad)
