"""The scalars of a step: what moves them, and the functions that are used on them."""

from keras import ops


class Scalars:
    """Functions of scalar tensors: some of `keras.ops`, and two of a step's state.

    What these two move are variables; where the backend `UPDATES_IN_PLACE`, the tensors
    that variables hold.
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
        """Moves a dynamic loss scale, and its count of finite steps since it moved.

        Args:
            scale: Float32 scalar variable.
            good_steps: Int32 scalar variable.
            finite: Boolean scalar tensor.
            drops: Boolean scalar tensor, whether the scale is multiplied by `backoff`;
                None if it is so at every overflow.
            growth: Float. What the scale is multiplied by after `period` finite steps.
            backoff: Float, or float32 scalar tensor.
            period: Int, or integer scalar tensor.
            bounds: Tuple of two floats, between which the scale stays.
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
        """Counts a step, which was applied or skipped.

        Args:
            skipped: Integer scalar variable, the number of skipped steps.
            applied: Integer scalar variable, the number of those that were applied;
                None if it has been counted.
            streaks: Integer variable of three elements: how many steps in a row were
                skipped, how many in a row overflowed at the lowest scale, and how many
                overflowed since the scale was last updated.
            finite: Boolean scalar tensor, whether the gradients are finite.
            rates_finite: Boolean scalar tensor, whether the coefficients of the step
                are; None if they are known to be. If only they are not, the step is
                skipped and leaves the scale as it is.
            scales: Tuple of the loss scale, a scalar tensor, and the lowest one there
                is, a float.
            update_scale: Bool, whether this step updates the scale.
            assign: Callable `(variable, value)`, which assigns what is no scalar: Keras
                allows that an optimizer has its own.

        Returns:
            Boolean scalar tensor, whether none overflowed since the scale was updated.
        """
        old = ops.convert_to_tensor(streaks)
        takes = (
            finite if rates_finite is None else ops.logical_and(finite, rates_finite)
        )
        missed = ops.cast(ops.logical_not(takes), old.dtype)
        overflows = ops.cast(ops.logical_not(finite), old.dtype)
        total = ops.convert_to_tensor(skipped)
        skipped.assign(total + ops.cast(missed, total.dtype))
        if applied is not None:
            count = ops.convert_to_tensor(applied)
            applied.assign(count + ops.cast(takes, count.dtype))
        scale, lowest = scales
        at_lowest = overflows * ops.cast(scale <= lowest, old.dtype)
        # Where the scale is updated the third number starts again.
        is_left = ops.ones_like(missed) if not update_scale else missed - overflows
        counted = old + ops.stack([missed, overflows, overflows])
        assign(streaks, counted * ops.stack([missed, at_lowest, is_left]))
        return counted[2] == 0
