"""Differentiation with respect to Keras variables: the parts that backends share."""

import keras
from keras import ops


class RecordingScope(keras.StatelessScope):
    """A `StatelessScope` that records which variables are read and written in it."""

    def __init__(self, state_mapping=()):
        # Otherwise Keras silently drops the losses that layers add.
        super().__init__(state_mapping, collect_losses=True)
        self.read, self.written = {}, {}

    def get_current_value(self, variable):
        """Returns the value in this scope, or else in the scope around it."""
        self.read[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update):
        self.written[id(update[0])] = update[0]
        super().add_update(update)


def trained_variables(loss_fn, run=lambda fn: fn()):
    """Returns the trainable variables that `loss_fn` reads, in the order of reading."""
    # Its assignments are discarded. Variables that it creates, as layers do, persist.
    try:
        with RecordingScope() as scope:
            run(loss_fn)
    except ValueError:
        # Keras does not create a variable from an initial value in a scope.
        loss_fn()
        with RecordingScope() as scope:
            run(loss_fn)
    return [v for v in scope.read.values() if v.trainable]


def weights_of(loss, grad_loss):
    """Returns the weights of the loss's elements, a tensor like the loss."""
    if grad_loss is None:
        return ops.ones_like(loss)
    weights = ops.cast(ops.convert_to_tensor(grad_loss), loss.dtype)
    check_shape_of_weights(loss.shape, weights.shape)
    return ops.broadcast_to(weights, loss.shape)


def check_shape_of_weights(loss_shape, shape):
    """Raises a `ValueError` if `grad_loss` cannot be broadcast to the loss's shape."""
    loss_shape, shape = tuple(loss_shape), tuple(shape)
    is_shorter = len(shape) <= len(loss_shape)
    aligned = zip(reversed(shape), reversed(loss_shape), strict=False)
    if not is_shorter or any(size not in (1, of_loss) for size, of_loss in aligned):
        raise ValueError(
            f"Argument `grad_loss` must have the loss's shape, {loss_shape}. "
            f"Received one of shape {shape}."
        )


def refuse_tape(tape):
    """Raises a `ValueError` for a `tf.GradientTape` on the other backends."""
    if tape is not None:
        raise ValueError(
            "A `tape` is TensorFlow's: this Keras backend has none, and does not need "
            "it. Pass a `loss` without arguments to be called, and no `tape`. "
            f"Received: tape={tape!r}"
        )
