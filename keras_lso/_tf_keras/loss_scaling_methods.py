"""The methods of tf.keras 2 on an optimizer that scales the loss.

Apart from `methods.py`, whose mixin optimizers without a loss scale have as well.
"""

from keras_lso._core.step import Gradients
from keras_lso._tf_keras.methods import TFKerasMethods


class TFKerasLossScaling(TFKerasMethods):
    """The methods that code written for a `LossScaleOptimizer` of tf.keras 2 calls."""

    # Whether `apply_gradients` takes unscaled gradients, as in tf.keras. Keras 3's own
    # trainers pass scaled ones.
    _takes_unscaled_pairs = False

    def apply_gradients(
        self,
        grads_and_vars,
        name=None,
        experimental_aggregate_gradients=True,
        skip_gradients_aggregation=False,
        *,
        scaled=None,
        update_scale=True,
        axis_name=None,
    ):
        """Updates the variables, or skips the step if a gradient is not finite.

        Args:
            grads_and_vars: List of `(gradient, variable)` pairs.
            name: String. Defaults to `None`. Keras 3 does not name operations.
            experimental_aggregate_gradients: Bool. Whether to add up the gradients
                of all replicas of a `tf.distribute.Strategy`. Defaults to `True`.
                If `False`, the caller has already done so.
            skip_gradients_aggregation: Bool. The opposite, as later versions of
                tf.keras have it. Defaults to `False`.
            scaled: See `apply`. Defaults to `None`.
            update_scale: See `apply`. Defaults to `True`.
            axis_name: See `apply`. Defaults to `None`.

        Returns:
            The variable that counts the applied steps.

        Raises:
            TypeError: If `grads_and_vars` is malformed.
            ValueError: If no variable has a gradient.
            RuntimeError: If called in a cross-replica context.
        """
        if scaled is None and self._takes_unscaled_pairs:
            nobody_knows = Gradients.UNKNOWN, Gradients.SCALED
            scaled = False if self._scaling.gradients in nobody_knows else None
        are_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        if are_reduced and axis_name is not None:
            raise ValueError(
                "`axis_name` says that the gradients are still to be averaged, and "
                "`skip_gradients_aggregation=True` that they are not. Give one of "
                f"them. Received: axis_name={axis_name!r}"
            )
        return self._apply_pairs(
            grads_and_vars,
            name,
            are_reduced,
            scaled=scaled,
            update_scale=update_scale,
            axis_name=axis_name,
        )

    def _scaled(self, loss):
        return self._scaling.scale(loss)

    def _unscaled(self, grads):
        return self.get_unscaled_gradients(grads)

    def _apply_scaled(self, grads_and_vars, name):
        return self.apply_gradients(grads_and_vars, name=name, scaled=True)

    def _weight_layouts(self):
        # The first has no loss scale, and leaves it unchanged.
        return [self.weights, self._state.variables, list(self.variables)]

    def _assign_weights(self, variables, values):
        saved = self._state.variables
        if len(variables) >= len(saved):
            self._state.assign(saved, values[: len(saved)])
        else:
            super()._assign_weights(variables, values)
