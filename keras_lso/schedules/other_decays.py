"""The Model Garden's decays that Keras does not have: powers and stepwise cosines."""

import itertools
import math

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._checks import (
    check_boundaries,
    check_int,
    check_list,
    check_positive_int,
    check_rate,
    check_real,
    check_share,
)
from keras_lso.schedules._members import check_name, elapsed, float32


def _power_of(step, power):
    """Returns a power of the step; step 0 and those before it count as step 1."""
    return ops.power(ops.maximum(step, float32(1)), float32(power))


@keras.saving.register_keras_serializable("keras_lso", name="DirectPowerDecay")
class DirectPowerDecay(LearningRateSchedule):
    """A learning rate that follows a power of the step.

    ```python
    rate = initial * max(step, 1) ** power
    ```

    Args:
        initial_learning_rate: Float. The rate of steps 0 and 1.
        power: Float. The power of the step; negative for a rate that falls, such as
            `-0.5`. Defaults to `1.0`.
        name: String. Defaults to `"DirectPowerDecay"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the rate is negative, NaN or infinite, or `power` is not
            finite.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.DirectPowerDecay(1.0, power=-0.5)
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 4, 100)]
    ['1.00', '1.00', '0.50', '0.10']
    """

    def __init__(self, initial_learning_rate, power=1.0, name="DirectPowerDecay"):
        self.initial_learning_rate = check_rate(
            "initial_learning_rate", initial_learning_rate
        )
        self.power = check_real("power", power)
        self.name = check_name(name, self)

    def __call__(self, step):
        return self.initial_learning_rate * _power_of(elapsed(step), self.power)

    def get_config(self):
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "power": self.power,
            "name": self.name,
        }


@keras.saving.register_keras_serializable("keras_lso", name="PowerAndLinearDecay")
class PowerAndLinearDecay(LearningRateSchedule):
    """A learning rate that follows a power of the step, and at last a line to zero.

    ```python
    step = step - offset
    rate = initial * max(step, 1) ** power
    tail = total_decay_steps * linear_decay_fraction
    if tail > 0:
        rate = max(rate * min((total_decay_steps - step) / tail, 1), 0)
    ```

    Before the offset the rate is the initial one. With `linear_decay_fraction=0`
    there is no line, and the power goes on after `total_decay_steps`.

    Args:
        initial_learning_rate: Float. The rate of the first step.
        total_decay_steps: Positive int. The number of steps after which the rate is
            zero.
        power: Float. The power of the step. Defaults to `1.0`.
        linear_decay_fraction: Float from 0 to 1. The share of the steps, the last
            ones, in which the rate is multiplied by a line to zero. Defaults to `0.1`.
        offset: Int. The step at which the decay starts. Defaults to `0`.
        name: String. Defaults to `"PowerAndLinearDecay"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the rate is negative, NaN or infinite, `power` is not finite,
            `total_decay_steps` is not a positive integer, or the fraction is not
            from 0 to 1.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.PowerAndLinearDecay(
    ...     1.0, total_decay_steps=8, power=0.0, linear_decay_fraction=0.5
    ... )
    >>> [float(schedule(step)) for step in (0, 4, 5, 6, 7, 8, 9)]
    [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    def __init__(
        self,
        initial_learning_rate,
        total_decay_steps,
        power=1.0,
        linear_decay_fraction=0.1,
        offset=0,
        name="PowerAndLinearDecay",
    ):
        self.initial_learning_rate = check_rate(
            "initial_learning_rate", initial_learning_rate
        )
        self.total_decay_steps = check_positive_int(
            "total_decay_steps", total_decay_steps
        )
        self.power = check_real("power", power)
        self.linear_decay_fraction = check_share(
            "linear_decay_fraction", linear_decay_fraction
        )
        self.offset = check_int("offset", offset)
        self.name = check_name(name, self)

    def __call__(self, step):
        step = elapsed(step, self.offset)
        rate = self.initial_learning_rate * _power_of(step, self.power)
        tail = self.total_decay_steps * self.linear_decay_fraction
        if tail == 0:
            return rate
        share = ops.minimum((self.total_decay_steps - step) / tail, float32(1))
        return ops.maximum(rate * share, float32(0))

    def get_config(self):
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "total_decay_steps": self.total_decay_steps,
            "power": self.power,
            "linear_decay_fraction": self.linear_decay_fraction,
            "offset": self.offset,
            "name": self.name,
        }


@keras.saving.register_keras_serializable("keras_lso", name="PowerDecayWithOffset")
class PowerDecayWithOffset(LearningRateSchedule):
    """A learning rate that follows a power of the steps since the offset.

    ```python
    if step <= offset:
        rate = pre_offset
    else:
        rate = min(initial * (step - offset) ** power, pre_offset)
    ```

    Args:
        initial_learning_rate: Float. The rate of the first step after the offset.
        power: Float. The power of the step; negative for a rate that falls, such as
            `-0.5`. Defaults to `1.0`.
        offset: Int. The last step before the decay. Defaults to `0`.
        pre_offset_learning_rate: Float. The rate up to the offset, itself included,
            and never exceeded after it. Defaults to `1e6`, which is not a rate to
            train with: put a warm-up of more than `offset` steps in front, or set it.
        name: String. Defaults to `"PowerDecayWithOffset"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, `power` is not finite, or
            `offset` is not an integer.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.PowerDecayWithOffset(
    ...     1.0, power=-0.5, offset=10, pre_offset_learning_rate=2.0
    ... )
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 10, 11, 14, 110)]
    ['2.00', '2.00', '1.00', '0.50', '0.10']
    """

    def __init__(
        self,
        initial_learning_rate,
        power=1.0,
        offset=0,
        pre_offset_learning_rate=1.0e6,
        name="PowerDecayWithOffset",
    ):
        self.initial_learning_rate = check_rate(
            "initial_learning_rate", initial_learning_rate
        )
        self.power = check_real("power", power)
        self.offset = check_int("offset", offset)
        self.pre_offset_learning_rate = check_rate(
            "pre_offset_learning_rate", pre_offset_learning_rate
        )
        self.name = check_name(name, self)

    def __call__(self, step):
        step = elapsed(step, self.offset)
        rate = self.initial_learning_rate * _power_of(step, self.power)
        highest = float32(self.pre_offset_learning_rate)
        return ops.where(step > 0, ops.minimum(rate, highest), highest)

    def get_config(self):
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "power": self.power,
            "offset": self.offset,
            "pre_offset_learning_rate": self.pre_offset_learning_rate,
            "name": self.name,
        }


@keras.saving.register_keras_serializable("keras_lso", name="StepCosineDecayWithOffset")
class StepCosineDecayWithOffset(LearningRateSchedule):
    """A learning rate that falls along one cosine after the other.

    ```python
    step = step - offset
    i = the last index with step >= boundaries[i], or 0
    if i is the last index:
        rate = values[-1]
    else:
        start = boundaries[i] if i > 0 else 0
        length = boundaries[i + 1] - boundaries[i]
        cosine = (1 + cos(pi * (step - start) / length)) / 2
        rate = values[i + 1] + (values[i] - values[i + 1]) * cosine
    ```

    From one boundary to the next the rate goes from one value to the next. As in the
    Model Garden, the first cosine starts at step 0 whatever `boundaries[0]` is, so
    start the list with 0; before the offset it is mirrored. After the last boundary,
    where the Model Garden's rate is NaN (a cosine of no steps), it stays at the last
    value. So with one boundary the rate is constant.

    Args:
        boundaries: List of ints, strictly increasing, as many as `values`. The steps
            at which the values are reached, counted from the offset.
        values: List of floats. The rates at the boundaries.
        offset: Int. The step at which the first cosine starts. Defaults to `0`.
        name: String. Defaults to `"StepCosineDecayWithOffset"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, or the boundaries do not
            increase or do not fit the values.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.StepCosineDecayWithOffset(
    ...     boundaries=[0, 4, 6], values=[1.0, 0.5, 0.0]
    ... )
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 2, 3, 4, 5, 6, 7)]
    ['1.00', '0.93', '0.75', '0.57', '0.50', '0.25', '0.00', '0.00']
    """

    def __init__(self, boundaries, values, offset=0, name="StepCosineDecayWithOffset"):
        values = check_list("values", values, at_least=1)
        self.boundaries = check_boundaries(
            boundaries, len(values), "as many as `values`"
        )
        self.values = [check_rate(f"values[{i}]", v) for i, v in enumerate(values)]
        self.offset = check_int("offset", offset)
        self.name = check_name(name, self)

    def __call__(self, step):
        step = elapsed(step, self.offset)
        intervals = itertools.pairwise(zip(self.boundaries, self.values, strict=True))
        rate = None
        for (start, value), (end, next_value) in intervals:
            position = step if rate is None else step - start
            cosine = (ops.cos(math.pi * position / (end - start)) + 1.0) / 2.0
            fallen = (value - next_value) * cosine + next_value
            rate = fallen if rate is None else ops.where(step >= start, fallen, rate)
        last = ops.zeros_like(step) + self.values[-1]
        if rate is None:
            return last
        return ops.where(step >= self.boundaries[-1], last, rate)

    def get_config(self):
        return {
            "boundaries": self.boundaries,
            "values": self.values,
            "offset": self.offset,
            "name": self.name,
        }
