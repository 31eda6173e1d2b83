"""What a `LossScaleOptimizer` counts: attempted steps, skips, and the largest gradient.

None of it is read by the host in a step.
"""

from typing import Any

from keras import ops

from keras_lso._backend import backend
from keras_lso._checks import check_positive_int
from keras_lso._keras_internals.optimizers import iteration_variable
from keras_lso._keras_internals.variables import read, storage_of


class StepCounters:
    """The counters of a `LossScaleOptimizer`.

    Args:
        policy: The `LossScale` whose `amax` and lowest scale are counted.
        inner_optimizer: The optimizer that counts the applied steps.
        attempted: Variable for the number of steps, skipped ones included.
        add_variable: Callable with the arguments of `keras.Optimizer.add_variable`.

    Attributes:
        attempted: The variable that counts the steps, skipped ones included.
        applied: The variable that counts those that were applied, the inner
            optimizer's.
        variables: List of those that are not saved. `amax_since_update`, for a
            loss-scale policy that asks for it: the largest magnitude among the
            gradients since the scale was last updated. `consecutive_skips`: how many
            steps in a row were skipped, how many of those at the lowest scale, and how
            many since the scale was last updated. Behind them `overflows`, once it is
            recorded.
    """

    def __init__(self, policy, inner_optimizer, attempted, add_variable):
        self._policy, self._inner_optimizer = policy, inner_optimizer
        self._add_variable = add_variable
        self.attempted = attempted
        self.applied = iteration_variable(inner_optimizer)
        self.variables = []
        # Nothing looks at single gradients until `record_overflows` is called.
        self.overflows: Any = None
        self._amax: Any = self._add("amax_since_update") if policy.needs_amax else None
        self._skips = self._add("consecutive_skips", "int", (3,))
        # An inner optimizer that has trained before has skipped nothing. A copy: on
        # JAX two variables must not share a buffer that `fit` donates.
        attempted.assign(ops.copy(self.applied))

    def _add(self, name, dtype="float32", shape=()):
        counter = self._add_variable(
            shape=shape,
            dtype=dtype,
            initializer="zeros",
            aggregation="only_first_replica",
            name=name,
        )
        self.variables.append(counter)
        return counter

    def count(self, finite, update_scale, has_counted):
        """Counts an attempted step; to be called before the scale moves.

        Args:
            finite: Boolean scalar tensor.
            update_scale: Bool. See `LossScaleOptimizer.apply`.
            has_counted: Bool. Whether the inner optimizer has counted the step, if it
                was applied. It does not count a fused one.

        Returns:
            Boolean scalar tensor. Whether all steps since the scale was last updated
            were finite: a loss that was applied with `update_scale=False` counts too.
        """
        scale = read(self._policy.scale)
        variables = [self.attempted, self.applied, self._skips]
        attempted, applied, skips = storage_of(variables)
        return backend.scalars.count_step(
            attempted,
            None if has_counted else applied,
            skips,
            finite,
            (scale, self._policy.min_scale),
            update_scale,
            self._inner_optimizer.assign,
        )

    def count_amax(self, amax, update_scale):
        """Returns the largest magnitude since the scale was last updated."""
        amax = ops.maximum(amax, ops.convert_to_tensor(self._amax))
        self._amax.assign(ops.zeros_like(amax) if update_scale else amax)
        return amax

    @property
    def skipped(self):
        """The number of steps that were skipped, an integer scalar tensor."""
        return ops.subtract(self.attempted, self.applied)

    @property
    def last_was_applied(self):
        """Whether the last step was applied, a boolean scalar tensor."""
        return ops.equal(ops.convert_to_tensor(self._skips)[0], 0)

    def skips_at_lowest(self):
        """Returns how many steps in a row were skipped at the lowest scale, an int.

        It reads that number from the device.
        """
        return int(ops.convert_to_numpy(self._skips)[1])

    def check_stalled(self, patience):
        """See `LossScaleOptimizer.check_stalled`."""
        patience = check_positive_int("patience", patience)
        skips = self.skips_at_lowest()
        if skips >= patience:
            raise FloatingPointError(
                f"The last {skips} steps were all skipped, at the lowest loss scale "
                f"there is ({self._policy.min_scale}): the gradients are "
                "inf or NaN at any scale, so the model itself has diverged. Go back "
                "to a checkpoint and lower the learning rate or clip the gradients "
                "(`global_clipnorm` of the inner optimizer)."
            )

    def reset(self):
        """Starts afresh, all but the number of applied steps."""
        self.attempted.assign(0)
        for variable in self.variables:
            variable.assign(ops.zeros(variable.shape, variable.dtype))

    def restore(self):
        """Counts the steps that were applied as attempted ones, if they are more.

        Keras's own class leaves the count of attempted steps at 0.
        """
        applied = int(self.applied.numpy())
        if int(self.attempted.numpy()) < applied:
            self.attempted.assign(applied)

    # --- Which gradients are not finite ---------------------------------------

    def record_overflows(self, count):
        """Looks at each of `count` gradients by itself from now on."""
        if self.overflows is None:
            self.overflows = self._add("overflows", "int32", (count,))

    def note_overflows(self, grads, positions, inv_scale):
        """Notes which gradients are not finite, or will not be once unscaled.

        Args:
            grads: List of tensors or None.
            positions: List of ints, where their variables stand among all.
            inv_scale: Float32 scalar tensor, or 1.0.
        """
        flags = [0] * self.overflows.shape[0]
        for grad, i in zip(grads, positions, strict=True):
            if grad is not None:
                finite = backend.measure([grad], inv_scale=inv_scale).finite
                flags[i] = ops.cast(ops.logical_not(finite), "int32")
        self.overflows.assign(ops.stack([ops.cast(f, "int32") for f in flags]))

    def overflowed(self):
        """Returns for each variable whether its gradient was not finite, an array."""
        if self.overflows is None:
            raise ValueError(
                "Which gradients are not finite is recorded only after "
                "`optimizer.record_overflows()`: call it, and make a step."
            )
        return ops.convert_to_numpy(self.overflows)
