"""The scalars of a step: what moves them, and the functions that are used on them."""

from keras import ops


class Scalars:
    """Functions of scalar tensors: those of `keras.ops`, and two of a step's state.

    What these two move are variables; where the backend `UPDATES_IN_PLACE`, the tensors
    that variables hold.
    """

    def __getattr__(self, name):
        return getattr(ops, name)

    def known(self, tensor):
        """Returns the number that a scalar tensor holds, where the host has it.

        None where to read it would synchronise, and while a step is traced.
        """
        return None

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
        self, attempted, applied, skips, finite, scales, update_scale, assign
    ):
        """Counts an attempted step.

        Args:
            attempted: Integer scalar variable, the number of steps.
            applied: Integer scalar variable, the number of those that were applied;
                None if it has been counted.
            skips: Integer variable of three elements: how many steps in a row were
                skipped, how many of those at the lowest scale, and how many since the
                scale was last updated.
            finite: Boolean scalar tensor.
            scales: Tuple of the loss scale, a scalar tensor, and the lowest one there
                is, a float.
            update_scale: Bool, whether this step updates the scale.
            assign: Callable `(variable, value)`, which assigns what is no scalar: Keras
                allows that an optimizer has its own.

        Returns:
            Boolean scalar tensor, whether none was skipped since the scale was updated.
        """
        attempted.assign(ops.convert_to_tensor(attempted) + 1)
        if applied is not None:
            count = ops.convert_to_tensor(applied)
            applied.assign(count + ops.cast(finite, count.dtype))
        old = ops.convert_to_tensor(skips)
        skipped = ops.cast(ops.logical_not(finite), old.dtype)
        scale, lowest = scales
        at_lowest = skipped * ops.cast(scale <= lowest, old.dtype)
        since_update = (ops.zeros_like if update_scale else ops.ones_like)(skipped)
        counted = old + skipped
        assign(skips, counted * ops.stack([skipped, at_lowest, since_update]))
        return counted[2] == 0
