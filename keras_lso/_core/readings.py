"""What a user reads off a `LossScaleOptimizer`: the scale, the counters, the overflows.

None of it changes anything but `record_overflows`, which begins to record.
"""

import keras
from keras import ops

from keras_lso import loss_scales
from keras_lso._keras_internals.optimizers import variables_of, where_variables_are_made


class Readings(keras.optimizers.Optimizer):
    """Properties and methods over the parts of a `LossScaleOptimizer`."""

    built: bool

    @property
    def loss_scale(self):
        """The current loss scale, a float32 scalar tensor."""
        return self.loss_scale_policy.value

    @property
    def initial_scale(self):
        """The loss scale of the first step, a float."""
        return self.loss_scale_policy.initial_loss_scale

    @property
    def dynamic_scale(self):
        """The variable behind `loss_scale`."""
        return self.loss_scale_policy.scale

    @property
    def step_counter(self):
        """The variable behind `dynamic_counter`."""
        return self.loss_scale_policy.step_counter

    @property
    def skipped_steps(self):
        """The number of steps that were skipped, an integer scalar tensor."""
        return self._counters.skipped

    @property
    def last_step_applied(self):
        """Whether the last step was applied, a boolean scalar tensor.

        True before the first one.
        """
        return self._counters.last_was_applied

    @property
    def dynamic(self):
        """Whether the loss scale adapts itself."""
        return not isinstance(self.loss_scale_policy, loss_scales.FixedLossScale)

    @property
    def dynamic_growth_steps(self):
        """Number of finite steps after which the scale grows; None if fixed."""
        return getattr(self.loss_scale_policy, "increment_period", None)

    @property
    def dynamic_counter(self):
        """Number of finite steps since the scale last moved; None if fixed."""
        return ops.copy(self.step_counter) if self.dynamic else None

    def check_stalled(self, patience=50):
        """Raises an error if training has come to a standstill.

        When even the lowest scale overflows, step after step, the model itself
        has diverged, and no loss scale can help it. This reads one number from
        the device: call it every now and then, not at every step.

        Args:
            patience: Int. Number of steps in a row, all skipped at the lowest
                scale, from which on training has stalled. Defaults to `50`.

        Raises:
            FloatingPointError: If that many steps were skipped.
        """
        self._counters.check_stalled(patience)

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
        with where_variables_are_made(self):
            self._counters.record_overflows(len(variables_of(self)))

    def overflowed_variables(self):
        """Returns which variables' gradients made the last step skip.

        Returns:
            List of variables, empty if the last step was applied. It reads a number
            for each variable from the device.

        Raises:
            ValueError: If nothing was recorded.
        """
        found = self._counters.overflowed()
        variables = variables_of(self)
        return [v for v, is_bad in zip(variables, found, strict=True) if is_bad]
