"""The counters of a `LossScaleOptimizer`: skipped steps, and the largest gradient.

The host reads no counter during a step.
"""

import functools
from typing import Any

from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import check_positive_int
from keras_lso._core.step_record import StepRecord
from keras_lso._keras_internals.optimizers import iteration_variable, largest_window
from keras_lso._keras_internals.rates import why_skipped
from keras_lso._keras_internals.variables import read, storage_of


def steps_attempted(optimizer):
    """Returns the number of steps so far, applied or not, an int read from the device.

    With accumulated gradients, steps are micro-batches. A window that a spike guard has
    dropped counts as one skipped step, and its other micro-batches no longer count as
    applied: see `undo_window`.

    Args:
        optimizer: The `LossScaleOptimizer`.
    """
    counters = optimizer._counters
    counts = counters.skipped, counters.applied, optimizer.skipped_spikes
    # By NumPy, since `int` does not accept a value that replicas share.
    skipped, applied, spikes = (int(ops.convert_to_numpy(count)) for count in counts)
    undone = max(largest_window(optimizer.inner_optimizer) - 1, 0)
    return skipped + applied + spikes * undone


class StepCounters:
    """The counters of a `LossScaleOptimizer`.

    Args:
        policy: The `LossScale` whose `amax` and lowest scale are counted.
        inner_optimizer: The optimizer that counts the applied steps. Its user may
            assign that count, for example to restart a learning-rate schedule.
        skipped: Variable for the number of skipped steps.
        add_variable: Callable with the arguments of `keras.Optimizer.add_variable`.

    Attributes:
        applied: The inner optimizer's variable that counts the applied steps.
        variables: List of the variables that are not saved. `amax_since_update`, for a
            loss-scale policy that needs it, is the largest magnitude among the
            gradients since the last update of the scale. `consecutive_skips` holds the
            number of skipped steps in a row, the number of overflows in a row at the
            lowest scale, and the number of overflows since the last update of the
            scale. `overflows` and the variables of `record` follow once they are
            recorded.
        record: The `StepRecord`; None until `record_steps` is called.
    """

    def __init__(self, policy, inner_optimizer, skipped, add_variable):
        self._policy, self._inner_optimizer = policy, inner_optimizer
        self._add_variable = add_variable
        self._skipped = skipped
        self.applied = iteration_variable(inner_optimizer)
        self.variables = []
        # Single gradients are not checked until `record_overflows` is called.
        self.overflows: Any = None
        self.record: Any = None
        self._amax: Any = self._add("amax_since_update") if policy.needs_amax else None
        self._streaks = self._add("consecutive_skips", "int", (3,))

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

    def count(self, finite, rates_finite, update_scale, has_counted):
        """Counts a step. It must be called before the scale moves.

        Args:
            finite: Boolean scalar tensor. Whether the gradients are finite.
            rates_finite: Boolean scalar tensor. Whether the coefficients of the step
                are finite; None if the host knows that they are.
            update_scale: Bool. See `LossScaleOptimizer.apply`.
            has_counted: Bool. Whether the inner optimizer has counted the step, if it
                was applied. It does not count a fused step.

        Returns:
            Boolean scalar tensor. Whether the gradients of all steps since the last
            update of the scale were finite. Steps with `update_scale=False` count too.
        """
        scale = read(self._policy.scale)
        variables = [self._skipped, self.applied, self._streaks]
        skipped, applied, streaks = storage_of(variables)
        return backend.scalars.count_step(
            skipped,
            None if has_counted else applied,
            streaks,
            finite,
            rates_finite,
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
    def moved_with_scale(self):
        """List of the variables that are reset when the scale is updated."""
        return [] if self._amax is None else [self._amax]

    @property
    def skipped(self):
        """The number of steps that were skipped, an integer scalar tensor."""
        # A copy: on PyTorch the variable's own tensor changes in place.
        return ops.copy(self._skipped)

    @property
    def last_was_applied(self):
        """Whether the last step was applied, a boolean scalar tensor."""
        return ops.equal(ops.convert_to_tensor(self._streaks)[0], 0)

    def skips_in_a_row(self):
        """Returns the number of skipped steps in a row, an int read from the device."""
        return int(ops.convert_to_numpy(self._streaks)[0])

    def skips_at_lowest(self):
        """Returns the number of steps in a row skipped at the lowest scale, an int.

        It reads the number from the device.
        """
        return int(ops.convert_to_numpy(self._streaks)[1])

    def check_stalled(self, patience):
        """See `LossScaleOptimizer.check_stalled`."""
        patience = check_positive_int("patience", patience)
        in_a_row = self.skips_in_a_row()
        reason = why_skipped(self._inner_optimizer) if in_a_row else None
        if reason is not None and in_a_row >= patience:
            raise FloatingPointError(
                f"The last {in_a_row} steps were all skipped. {reason}"
            )
        skips = self.skips_at_lowest()
        if skips >= patience:
            raise FloatingPointError(
                f"The last {skips} steps were all skipped at the lowest loss scale "
                f"({self._policy.min_scale}): the gradients are "
                "inf or NaN at any scale, so the model itself has diverged. Go back "
                "to a checkpoint and lower the learning rate or clip the gradients "
                "(`global_clipnorm` of the inner optimizer)."
            )

    def reset(self):
        """Resets everything except the number of applied steps."""
        if self.record is not None:
            self.record.restart()
        for variable in (self._skipped, *self.variables):
            variable.assign(ops.zeros(variable.shape, variable.dtype))

    # --- The record of each step ----------------------------------------------

    def record_steps(self, length, optimizer):
        """Starts recording each step; see `LossScaleOptimizer.record_steps`."""
        length = check_positive_int("length", length)
        if self.record is None:
            attempted = functools.partial(steps_attempted, optimizer)
            self.record = StepRecord(length, optimizer, attempted, self._add)
        elif self.record.length < length:
            raise ValueError(
                "The optimizer already records its steps, the last "
                f"{self.record.length} of them. Ask for the length that you need "
                f"before the first step. Received: length={length}"
            )

    def read_record(self):
        """See `LossScaleOptimizer.read_record`."""
        if self.record is None:
            raise ValueError(
                "Steps are recorded only after `optimizer.record_steps()`. Call it, "
                "and make a step."
            )
        return self.record.read()

    # --- The record of gradients that are not finite --------------------------

    def record_overflows(self, count):
        """Starts checking each of `count` gradients separately."""
        if self.overflows is None:
            self.overflows = self._add("overflows", "int32", (count,))

    def stop_recording_overflows(self):
        """Stops checking single gradients."""
        if self.overflows is not None:
            at = list(map(id, self.variables)).index(id(self.overflows))
            del self.variables[at]
            self.overflows = None

    def note_overflows(self, grads, positions):
        """Stores which gradients are not finite.

        Args:
            grads: List of tensors, as they are applied.
            positions: List of ints, the positions of their variables among all.
        """
        flags = [0] * self.overflows.shape[0]
        for grad, i in zip(grads, positions, strict=True):
            finite = backend.measure([grad]).finite
            flags[i] = ops.cast(ops.logical_not(finite), "int32")
        self.overflows.assign(ops.stack([ops.cast(f, "int32") for f in flags]))

    def overflowed(self):
        """Returns for each variable whether its gradient was not finite, an array."""
        if self.overflows is None:
            raise ValueError(
                "Overflows are recorded only after `optimizer.record_overflows()`. "
                "Call it, and make a step."
            )
        return ops.convert_to_numpy(self.overflows)
