"""The Model Garden's decays that Keras lacks: powers and stepwise cosines.

They are apart from `keras_decays.py`, whose classes are Keras's as well.
"""

import itertools

from keras import ops

from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import (
    float32,
    half_cosine,
    power_of_step,
    shares,
)
from keras_lso.schedules._declared import Schedule, declared, field
from keras_lso.schedules._steps import (
    elapsed,
    in_float32,
    is_before,
    left_and_done,
    left_and_done_between,
)


@declared("DirectPowerDecay")
class DirectPowerDecay(Schedule):
    """A learning rate that follows a power of the step.

    ```python
    rate = initial * max(step, 1) ** power
    ```

    Args:
        initial_learning_rate: Float. The rate of steps 0 and 1.
        power: Float. Negative for a rate that falls, such as `-0.5`.
        {{others}}

    Example:

    >>> from keras_lso.schedules import DirectPowerDecay
    >>> schedule = DirectPowerDecay(1.0, power=-0.5)
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 4, 100)]
    ['1.00', '1.00', '0.50', '0.10']
    """

    initial_learning_rate: float = field(check.rate)
    power: float = field(check.real, default=1.0)
    name: str = field(check.name, default="DirectPowerDecay")

    def __call__(self, step):
        rate = power_of_step(elapsed(step), self.power)
        return self.initial_learning_rate * rate


@declared("PowerAndLinearDecay")
class PowerAndLinearDecay(Schedule):
    """A learning rate that follows a power of the step, and ends in a line to zero.

    ```python
    step = step - offset
    rate = initial * max(step, 1) ** power
    tail = total_decay_steps * linear_decay_fraction
    if tail > 0:
        rate = max(rate * min((total_decay_steps - step) / tail, 1), 0)
    ```

    Before the offset the rate is the initial one. With `linear_decay_fraction=0`
    there is no line, and the rate follows the power after `total_decay_steps` as well.

    Args:
        initial_learning_rate: Float. The rate of the first step.
        total_decay_steps: Positive int. The step after the offset at which the rate
            is zero.
        power: Float. The power of the step.
        linear_decay_fraction: Float from 0 to 1. The share of the steps, the last
            ones, in which the rate is multiplied by a line to zero.
        {{others}}

    Example:

    >>> from keras_lso.schedules import PowerAndLinearDecay
    >>> schedule = PowerAndLinearDecay(1.0, 8, power=0.0, linear_decay_fraction=0.5)
    >>> [float(schedule(step)) for step in (0, 4, 5, 6, 7, 8, 9)]
    [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    initial_learning_rate: float = field(check.rate)
    total_decay_steps: int = field(check.positive_int)
    power: float = field(check.real, default=1.0)
    linear_decay_fraction: float = field(check.share, default=0.1)
    offset: int = field(check.integer, default=0)
    name: str = field(check.name, default="PowerAndLinearDecay")

    def __call__(self, step):
        steps = elapsed(step, self.offset)
        rate = self.initial_learning_rate * power_of_step(steps, self.power)
        tail = self.total_decay_steps * self.linear_decay_fraction
        if tail == 0:
            return rate
        left, _ = left_and_done(steps, self.total_decay_steps)
        # A tail of less than a step has none. It might be no float32 either.
        tail = max(tail, 1e-6)
        rate = ops.where(left < tail, rate * (left / tail), rate)
        # A power may be infinite, and that times zero NaN.
        return ops.where(left > 0, rate, float32(0))


@declared("PowerDecayWithOffset")
class PowerDecayWithOffset(Schedule):
    """A learning rate that follows a power of the steps since the offset.

    ```python
    if step <= offset:
        rate = pre_offset
    else:
        rate = min(initial * (step - offset) ** power, pre_offset)
    ```

    Args:
        initial_learning_rate: Float. The rate of the first step after the offset.
        power: Float. Negative for a rate that falls, such as `-0.5`.
        offset: Int. The last step before the decay.
        pre_offset_learning_rate: Float. The rate up to the offset, itself included,
            and never exceeded after it. Defaults to `1e6`, which is not a rate to
            train with: put a warm-up of more than `offset` steps in front, or set it.
        {{others}}

    Example:

    >>> from keras_lso.schedules import PowerDecayWithOffset
    >>> schedule = PowerDecayWithOffset(1.0, -0.5, 10, pre_offset_learning_rate=2.0)
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 10, 11, 14, 110)]
    ['2.00', '2.00', '1.00', '0.50', '0.10']
    """

    initial_learning_rate: float = field(check.rate)
    power: float = field(check.real, default=1.0)
    offset: int = field(check.integer, default=0)
    pre_offset_learning_rate: float = field(check.rate, default=1.0e6)
    name: str = field(check.name, default="PowerDecayWithOffset")

    def __call__(self, step):
        steps = elapsed(step, self.offset)
        rate = self.initial_learning_rate * power_of_step(steps, self.power)
        highest = float32(self.pre_offset_learning_rate)
        has_begun = in_float32(steps) > 0
        return ops.where(has_begun, ops.minimum(rate, highest), highest)


@declared("StepCosineDecayWithOffset")
class StepCosineDecayWithOffset(Schedule):
    """A learning rate that falls along consecutive half cosines.

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

    From one boundary to the next the rate moves from one value to the next. As in the
    Model Garden, the first cosine starts at step 0 whatever `boundaries[0]` is, so
    start the list with 0; before the offset the cosine is mirrored. After the last
    boundary, where the Model Garden's rate is NaN (a cosine of no steps), the rate
    stays at the last value. With one boundary it is constant.

    Args:
        boundaries: List of ints, strictly increasing, as many as `values`. The steps
            at which the values are reached, counted from the offset.
        values: List of floats. The rates at the boundaries.
        {{others}}

    Example:

    >>> from keras_lso.schedules import StepCosineDecayWithOffset
    >>> schedule = StepCosineDecayWithOffset([0, 4, 6], values=[1.0, 0.5, 0.0])
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 2, 3, 4, 5, 6, 7)]
    ['1.00', '0.93', '0.75', '0.57', '0.50', '0.25', '0.00', '0.00']
    """

    boundaries: list = field(check.any_list)
    values: list = field(check.list_of(check.rate, at_least=1))
    offset: int = field(check.integer, default=0)
    name: str = field(check.name, default="StepCosineDecayWithOffset")

    def _validate(self):
        self.boundaries = check.boundaries(
            self.boundaries, len(self.values), "as many as `values`"
        )

    def __call__(self, step):
        steps = elapsed(step, self.offset)
        last = float32(self.values[-1])
        if len(self.values) == 1:
            return last
        start, end, value, next_value = self._interval(steps)
        left, done = shares(*left_and_done_between(steps, start, end))
        rate = value * half_cosine(left) + next_value * half_cosine(done)
        return ops.where(is_before(steps, self.boundaries[-1]), rate, last)

    def _interval(self, steps):
        """Returns the first and the last step of the current interval, their values."""
        points = list(zip(self.boundaries, self.values, strict=True))
        # As in the Model Garden, whatever the first boundary is.
        length = self.boundaries[1] - self.boundaries[0]
        found = [0, length, *map(float32, self.values[:2])]
        for (start, value), (end, next_value) in itertools.pairwise(points[1:]):
            later = start, end, float32(value), float32(next_value)
            is_earlier = is_before(steps, start)
            pairs = zip(found, later, strict=True)
            found = [ops.where(is_earlier, old, new) for old, new in pairs]
        return found
