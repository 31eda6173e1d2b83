"""Which gradients were not finite, for those who ask."""

from keras import ops

from keras_lso import adapters, backend
from keras_lso._optimizer_state import OptimizerState


class Overflows(OptimizerState):
    """Records which gradients made a `LossScaleOptimizer` skip a step."""

    # A variable, once somebody has asked: one more look at every gradient.
    _overflows = None

    def record_overflows(self):
        """Records from now on which gradients are not finite.

        A step that is skipped says only that one of them was not. To find out which,
        every gradient is looked at by itself, which costs one more read: ask for it
        when something is wrong. It adds one variable to `variables`, so that compiled
        functions must be made anew: `model.make_train_function(force=True)`, or
        `jax.jit` of a new function.

        Raises:
            ValueError: If the optimizer has not been built yet.
        """
        if not self.built:
            raise ValueError(
                "To call `record_overflows`, LossScaleOptimizer must be built. Call "
                "`optimizer.build(trainable_variables)` first."
            )
        if self._overflows is None:
            count = len(adapters.trainable_variables(self))
            with adapters.where_variables_are_made(self):
                # Not by assignment: Keras would track it a second time.
                self.__dict__["_overflows"] = self._add_counter(
                    "overflows", "int32", (count,)
                )

    def overflowed_variables(self):
        """Returns which variables' gradients made the last step skip.

        Returns:
            List of variables, empty if the last step was applied. It reads a number
            for each variable from the device.

        Raises:
            ValueError: If nothing was recorded.
        """
        if self._overflows is None:
            raise ValueError(
                "Which gradients are not finite is recorded only after "
                "`optimizer.record_overflows()`: call it, and make a step."
            )
        found = ops.convert_to_numpy(self._overflows)
        variables = adapters.trainable_variables(self)
        return [v for v, is_bad in zip(variables, found, strict=True) if is_bad]

    def _record(self, grads, variables, inv_scale):
        """Writes down which gradients are not finite, or will not be once unscaled."""
        if self._overflows is None:
            return
        flags = [0] * len(adapters.trainable_variables(self))
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None:
                finite = backend.measure([grad], inv_scale=inv_scale).finite
                flags[adapters.index_of(self, variable)] = ops.cast(
                    ops.logical_not(finite), "int32"
                )
        self._overflows.assign(ops.stack([ops.cast(f, "int32") for f in flags]))
