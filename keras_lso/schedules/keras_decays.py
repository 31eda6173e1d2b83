"""Keras's own decays, started some steps later."""

import keras
import numpy as np
from keras import ops
from keras.optimizers import schedules

from keras_lso._checks import (
    check_bool,
    check_boundaries,
    check_factor,
    check_int,
    check_list,
    check_positive_int,
    check_rate,
)
from keras_lso.schedules._members import check_name, elapsed, float32, straight_line


class _WithOffset(schedules.LearningRateSchedule):
    """Mixin in front of a schedule of Keras's: `schedule(step - offset)`."""

    keras_class: type
    """The schedule of Keras's."""

    def __init__(self, offset, name, **arguments):
        super().__init__(name=check_name(name, self), **arguments)
        self.offset = check_int("offset", offset)

    def __call__(self, step):
        return self.decayed(elapsed(step, self.offset))

    def decayed(self, step):
        """Returns the rate so many steps after the offset, a float32 scalar."""
        # Keras computes in the dtype of the rates: floats become `floatx`, whose
        # float16 cannot count beyond 65504 steps.
        config = {
            key: np.asarray(value, "float32") if key in _RATES else value
            for key, value in super().get_config().items()
        }
        return float32(self.keras_class(**config)(step))

    def get_config(self):
        return {"offset": self.offset, **super().get_config()}


_RATES = ("initial_learning_rate", "values")


@keras.saving.register_keras_serializable(
    "keras_lso", name="PiecewiseConstantDecayWithOffset"
)
class PiecewiseConstantDecayWithOffset(_WithOffset, schedules.PiecewiseConstantDecay):
    """`keras.optimizers.schedules.PiecewiseConstantDecay`, `offset` steps later.

    ```python
    step = step - offset
    if step <= boundaries[0]: rate = values[0]
    elif step <= boundaries[1]: rate = values[1]
    ...
    else: rate = values[-1]
    ```

    Note that a boundary itself still belongs to the interval before it.

    Args:
        offset: Int. The step at which the schedule starts. Defaults to `0`.
        boundaries: List of ints, strictly increasing. The last step of each
            interval but the last one, counted from the offset.
        values: List of floats, one more than `boundaries`. The rates.
        name: String. Defaults to `"PiecewiseConstantDecayWithOffset"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, or the boundaries do not
            increase or do not fit the values.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.PiecewiseConstantDecayWithOffset(
    ...     offset=10, boundaries=[2, 4], values=[1.0, 0.5, 0.25]
    ... )
    >>> [float(schedule(step)) for step in (0, 10, 12, 13, 14, 15)]
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    """

    keras_class = schedules.PiecewiseConstantDecay

    def __init__(
        self,
        offset=0,
        *,
        boundaries,
        values,
        name="PiecewiseConstantDecayWithOffset",
    ):
        values = check_list("values", values, at_least=2)
        super().__init__(
            offset,
            name,
            boundaries=check_boundaries(
                boundaries,
                len(values) - 1,
                f"one fewer than the {len(values)} `values`",
            ),
            values=[check_rate(f"values[{i}]", v) for i, v in enumerate(values)],
        )


@keras.saving.register_keras_serializable("keras_lso", name="PolynomialDecayWithOffset")
class PolynomialDecayWithOffset(_WithOffset, schedules.PolynomialDecay):
    """`keras.optimizers.schedules.PolynomialDecay`, `offset` steps later.

    ```python
    step = min(step - offset, decay_steps)
    rate = (initial - end) * (1 - step / decay_steps) ** power + end
    ```

    With `cycle=True` the rate restarts: `decay_steps` is then the first multiple of
    itself that is not below the step. Before the offset the formula goes on in the
    other direction, and the rate is above the initial one; with `cycle=True`, for
    which the Model Garden's rate is infinite or negative there, it is the initial one.
    Put a warm-up in front.

    Args:
        offset: Int. The step at which the decay starts. Defaults to `0`.
        initial_learning_rate: Float. The rate at the offset.
        decay_steps: Positive int. The number of steps (not epochs) of the decay.
        end_learning_rate: Float. The rate after it. Defaults to `0.0001`.
        power: Float of zero or more. Defaults to `1.0`: a straight line.
        cycle: Bool. Whether the rate restarts. Defaults to `False`.
        name: String. Defaults to `"PolynomialDecayWithOffset"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate or `power` is negative, NaN or infinite, or
            `decay_steps` is not a positive integer.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.PolynomialDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0
    ... )
    >>> [float(schedule(step)) for step in (8, 10, 11, 12, 13, 14, 15)]
    [1.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    keras_class = schedules.PolynomialDecay

    def __init__(
        self,
        offset=0,
        *,
        initial_learning_rate,
        decay_steps,
        end_learning_rate=0.0001,
        power=1.0,
        cycle=False,
        name="PolynomialDecayWithOffset",
    ):
        super().__init__(
            offset,
            name,
            initial_learning_rate=check_rate(
                "initial_learning_rate", initial_learning_rate
            ),
            decay_steps=check_positive_int("decay_steps", decay_steps),
            end_learning_rate=check_rate("end_learning_rate", end_learning_rate),
            power=check_rate("power", power),
            cycle=check_bool("cycle", cycle),
        )

    def decayed(self, step):
        # The multiple of the decay's length would be zero, or negative.
        return super().decayed(ops.maximum(step, float32(0)) if self.cycle else step)


@keras.saving.register_keras_serializable(
    "keras_lso", name="ExponentialDecayWithOffset"
)
class ExponentialDecayWithOffset(_WithOffset, schedules.ExponentialDecay):
    """`keras.optimizers.schedules.ExponentialDecay`, `offset` steps later.

    ```python
    rate = initial * decay_rate ** ((step - offset) / decay_steps)
    ```

    With `staircase=True` the exponent is rounded down. Before the offset the formula
    goes on in the other direction, and the rate is above the initial one: put a
    warm-up in front.

    Args:
        offset: Int. The step at which the decay starts. Defaults to `0`.
        initial_learning_rate: Float. The rate at the offset.
        decay_steps: Positive int. The number of steps (not epochs) in which the rate
            is multiplied by `decay_rate` once.
        decay_rate: Positive float.
        staircase: Bool. Whether the rate falls in stairs. Defaults to `False`.
        name: String. Defaults to `"ExponentialDecayWithOffset"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the initial rate is negative, NaN or infinite, or
            `decay_steps` or `decay_rate` is not positive.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.ExponentialDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=2, decay_rate=0.25
    ... )
    >>> [f"{float(schedule(step)):.2f}" for step in (9, 10, 11, 12)]
    ['2.00', '1.00', '0.50', '0.25']
    """

    keras_class = schedules.ExponentialDecay

    def __init__(
        self,
        offset=0,
        *,
        initial_learning_rate,
        decay_steps,
        decay_rate,
        staircase=False,
        name="ExponentialDecayWithOffset",
    ):
        super().__init__(
            offset,
            name,
            initial_learning_rate=check_rate(
                "initial_learning_rate", initial_learning_rate
            ),
            decay_steps=check_positive_int("decay_steps", decay_steps),
            decay_rate=check_factor("decay_rate", decay_rate, above=0.0),
            staircase=check_bool("staircase", staircase),
        )


@keras.saving.register_keras_serializable("keras_lso", name="CosineDecayWithOffset")
class CosineDecayWithOffset(_WithOffset, schedules.CosineDecay):
    """`keras.optimizers.schedules.CosineDecay`, `offset` steps later.

    ```python
    step = step - offset
    if warmup_target is None:
        top, warmup_steps = initial, 0
    elif step < warmup_steps:
        return initial + step / warmup_steps * (warmup_target - initial)
    else:
        top = warmup_target
    step = min(step - warmup_steps, decay_steps)
    cosine = (1 + cos(pi * step / decay_steps)) / 2
    rate = top * ((1 - alpha) * cosine + alpha)
    ```

    Before the offset the formula goes on in the other direction: put a warm-up in
    front.

    Args:
        offset: Int. The step at which the schedule starts. Defaults to `0`.
        initial_learning_rate: Float. The rate at the offset.
        decay_steps: Positive int. The number of steps (not epochs) of the decay.
        alpha: Float. The last rate as a fraction of the highest one. Defaults to
            `0.0`.
        name: String. Defaults to `"CosineDecayWithOffset"`.
        warmup_target: Float. The rate that a linear warm-up of its own leads to.
            Defaults to `None`: no warm-up.
        warmup_steps: Int of zero or more. The number of steps of that warm-up.
            Defaults to `0`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate or `alpha` is negative, NaN or infinite, `decay_steps`
            is not a positive integer, or `warmup_steps` is not one of zero or more.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.CosineDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=4
    ... )
    >>> [f"{float(schedule(step)):.3f}" for step in (10, 11, 12, 13, 14, 15)]
    ['1.000', '0.854', '0.500', '0.146', '0.000', '0.000']

    Reference:

    - [Loshchilov and Hutter, 2017, SGDR](https://arxiv.org/abs/1608.03983)
    """

    keras_class = schedules.CosineDecay

    def __init__(
        self,
        offset=0,
        *,
        initial_learning_rate,
        decay_steps,
        alpha=0.0,
        name="CosineDecayWithOffset",
        warmup_target=None,
        warmup_steps=0,
    ):
        if warmup_target is not None:
            warmup_target = check_rate("warmup_target", warmup_target)
        super().__init__(
            offset,
            name,
            initial_learning_rate=check_rate(
                "initial_learning_rate", initial_learning_rate
            ),
            decay_steps=check_positive_int("decay_steps", decay_steps),
            alpha=check_rate("alpha", alpha),
            warmup_target=warmup_target,
            warmup_steps=check_int("warmup_steps", warmup_steps, at_least=0),
        )

    def decayed(self, step):
        if self.warmup_target is None:
            return super().decayed(step)
        # Keras's own warm-up is an `ops.cond`, which waits for the device on PyTorch.
        decay = self.keras_class(
            np.asarray(self.warmup_target, "float32"), self.decay_steps, self.alpha
        )
        warmup_rate = straight_line(
            step, self.warmup_steps, self.initial_learning_rate, self.warmup_target
        )
        return ops.where(
            step < self.warmup_steps, warmup_rate, decay(step - self.warmup_steps)
        )
