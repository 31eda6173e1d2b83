"""The Model Garden's decays that Keras lacks: powers and stepwise cosines.

They are apart from `keras_decays.py`, whose arithmetic is Keras's.
"""

import itertools

from keras import ops

from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import elapsed, float32, half_cosine, power_of_step
from keras_lso.schedules._declared import Schedule, declared, field


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
        return self.initial_learning_rate * power_of_step(elapsed(step), self.power)


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
        step = elapsed(step, self.offset)
        rate = self.initial_learning_rate * power_of_step(step, self.power)
        tail = self.total_decay_steps * self.linear_decay_fraction
        if tail == 0:
            return rate
        share = ops.minimum((self.total_decay_steps - step) / tail, float32(1))
        return ops.maximum(rate * share, float32(0))


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
        step = elapsed(step, self.offset)
        rate = self.initial_learning_rate * power_of_step(step, self.power)
        highest = float32(self.pre_offset_learning_rate)
        return ops.where(step > 0, ops.minimum(rate, highest), highest)


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
        step = elapsed(step, self.offset)
        intervals = itertools.pairwise(zip(self.boundaries, self.values, strict=True))
        rate = None
        for (start, value), (end, next_value) in intervals:
            position = step if rate is None else step - start
            cosine = half_cosine(position, end - start)
            fallen = (value - next_value) * cosine + next_value
            rate = fallen if rate is None else ops.where(step >= start, fallen, rate)
        last = ops.zeros_like(step) + self.values[-1]
        if rate is None:
            return last
        return ops.where(step >= self.boundaries[-1], last, rate)
