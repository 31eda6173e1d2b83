"""The scalars of a step, such as the loss scale: their functions and updates."""

from keras import ops


class Scalars:
    """Functions of scalar tensors: some of `keras.ops`, and three that update state.

    These three update variables or, if the backend `UPDATES_IN_PLACE`, the tensors that
    they hold. `assign(variable, value)` assigns variables that are not scalar, in the
    optimizer's own way.
    """

    cast = staticmethod(ops.cast)
    clip = staticmethod(ops.clip)
    copy = staticmethod(ops.copy)
    logical_and = staticmethod(ops.logical_and)
    logical_not = staticmethod(ops.logical_not)
    logical_or = staticmethod(ops.logical_or)
    maximum = staticmethod(ops.maximum)
    ones_like = staticmethod(ops.ones_like)
    reciprocal = staticmethod(ops.reciprocal)
    sqrt = staticmethod(ops.sqrt)
    where = staticmethod(ops.where)
    zeros_like = staticmethod(ops.zeros_like)

    def move_scale(
        self, scale, good_steps, finite, drops, growth, backoff, period, bounds
    ):
        """Updates a dynamic loss scale, and its count of finite steps since it changed.

        After `period` finite steps the scale is multiplied by `growth`. It is
        multiplied by `backoff` where `drops`, by default at every overflow, and stays
        within `bounds`.
        """
        old = ops.convert_to_tensor(scale)
        counted = ops.convert_to_tensor(good_steps) + 1
        overflows = ops.logical_not(finite)
        grows = ops.logical_and(finite, counted >= period)
        dropped = ops.where(overflows if drops is None else drops, old * backoff, old)
        restarts = ops.logical_or(grows, overflows)
        good_steps.assign(ops.where(restarts, ops.zeros_like(counted), counted))
        scale.assign(ops.clip(ops.where(grows, old * growth, dropped), *bounds))

    def count_step(
        self,
        skipped,
        applied,
        streaks,
        finite,
        rates_finite,
        scales,
        update_scale,
        assign,
    ):
        """Counts a step; returns whether none overflowed since the scale was updated.

        `skipped` and `applied` are counts; `applied` is None if the step was counted
        already. `streaks` has the steps skipped in a row, those of them that overflowed
        at the lowest scale, and the overflows since the scale was last updated.
        `rates_finite` tells whether the step's coefficients are finite, None if they
        are known to be. If only these are not, the step is skipped, and the scale
        stays. `scales` are the loss scale and its lower bound; `update_scale` tells
        whether this step updates it.
        """
        old = ops.convert_to_tensor(streaks)
        takes = finite if rates_finite is None else finite & rates_finite
        missed = ops.cast(ops.logical_not(takes), old.dtype)
        overflows = ops.cast(ops.logical_not(finite), old.dtype)
        total = ops.convert_to_tensor(skipped)
        skipped.assign(total + ops.cast(missed, total.dtype))
        if applied is not None:
            count = ops.convert_to_tensor(applied)
            applied.assign(count + ops.cast(takes, count.dtype))
        scale, lowest = scales
        at_lowest = overflows * ops.cast(scale <= lowest, old.dtype)
        # The third count restarts when the scale is updated.
        is_left = ops.ones_like(missed) if not update_scale else missed - overflows
        counted = old + ops.stack([missed, overflows, overflows])
        assign(streaks, counted * ops.stack([missed, at_lowest, is_left]))
        return counted[2] == 0

    def append_row(self, ring, count, row, assign):
        """Writes scalars as the next row of a ring buffer, and counts it."""
        rows, number = ops.convert_to_tensor(ring), ops.convert_to_tensor(count)
        length = ring.shape[0]
        places = ops.arange(length, dtype=number.dtype)
        is_next = ops.expand_dims(places == number % length, 1)
        row = ops.stack([ops.cast(value, "float32") for value in row])
        assign(ring, ops.where(is_next, row, rows))
        count.assign(number + 1)
