"""Keras's own decays, started some steps later.

They are apart from `other_decays.py` because they are Keras's classes as well. Their
arithmetic is not Keras's, which counts and divides in the dtype of the rate: compiled,
its `PolynomialDecay` may end in NaN, and its stairs begin a step late.
"""

import math
from dataclasses import KW_ONLY
from typing import Any

from keras import ops
from keras.optimizers import schedules

from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import (
    float32,
    half_cosine,
    one_minus_power,
    shares,
    warmed_up,
)
from keras_lso.schedules._declared import Schedule, declared, field
from keras_lso.schedules._powers import power_of_rate
from keras_lso.schedules._steps import (
    elapsed,
    left_and_done,
    left_and_done_of_cycles,
    rounded_up,
    since,
    whole_and_rest,
)


class _WithOffset(Schedule):
    """Mixin in front of a schedule of Keras: `schedule(step - offset)`."""

    keras_class: Any
    """The schedule of Keras."""

    offset: int

    def _validate(self):
        # A version of Keras may prepare more than the attributes.
        super().__init__(**self.keras_class.get_config(self))

    def __call__(self, step):
        return self.decayed(elapsed(step, self.offset))

    def decayed(self, step):
        """Returns the rate at `Steps` since the offset, in float32."""
        raise NotImplementedError


@declared("PiecewiseConstantDecayWithOffset")
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
        boundaries: List of ints, strictly increasing. The last step of each
            interval but the last one, counted from the offset.
        values: List of floats, one more than `boundaries`. The rates.
        {{others}}

    Example:

    >>> from keras_lso.schedules import PiecewiseConstantDecayWithOffset
    >>> schedule = PiecewiseConstantDecayWithOffset(
    ...     offset=10, boundaries=[2, 4], values=[1.0, 0.5, 0.25]
    ... )
    >>> [float(schedule(step)) for step in (0, 10, 12, 13, 14, 15)]
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    """

    keras_class = schedules.PiecewiseConstantDecay

    offset: int = field(check.integer, default=0)
    _: KW_ONLY
    boundaries: list = field(check.any_list)
    values: list = field(check.list_of(check.rate, at_least=2))
    name: str = field(check.name, default="PiecewiseConstantDecayWithOffset")

    def _validate(self):
        count = len(self.values)
        reason = f"one fewer than the {count} `values`"
        self.boundaries = check.boundaries(self.boundaries, count - 1, reason)
        super()._validate()

    def decayed(self, step):
        step = rounded_up(step)
        first, *later = self.values
        rate = float32(first)
        for boundary, value in zip(self.boundaries, later, strict=True):
            rate = ops.where(step > boundary, float32(value), rate)
        return rate


@declared("PolynomialDecayWithOffset")
class PolynomialDecayWithOffset(_WithOffset, schedules.PolynomialDecay):
    """`keras.optimizers.schedules.PolynomialDecay`, `offset` steps later.

    ```python
    step = min(step - offset, decay_steps)
    rate = (initial - end) * (1 - step / decay_steps) ** power + end
    ```

    {{before_the_offset}}

    With `cycle=True` the rate restarts: `decay_steps` is then the first multiple of
    itself that is not below the step. Before the offset, where the Model Garden's rate
    is then infinite or negative, it is the initial one.

    The rate is exact at the ends of the decay and of cycles, compiled as well. Keras's
    own class divides by a constant, and XLA multiplies by its rounded inverse: with a
    `power` below 1 the rate may then be NaN from `decay_steps` on.

    Args:
        end_learning_rate: Float. The rate after the decay.
        power: Float of zero or more. Defaults to `1.0`: a straight line.
        cycle: Bool. Whether the rate restarts.
        {{others}}

    Example:

    >>> from keras_lso.schedules import PolynomialDecayWithOffset
    >>> schedule = PolynomialDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0
    ... )
    >>> [float(schedule(step)) for step in (8, 10, 11, 12, 13, 14, 15)]
    [1.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    keras_class = schedules.PolynomialDecay

    offset: int = field(check.integer, default=0)
    _: KW_ONLY
    initial_learning_rate: float = field(check.rate)
    decay_steps: int = field(check.positive_int)
    end_learning_rate: float = field(check.rate, default=0.0001)
    power: float = field(check.rate, default=1.0)
    cycle: bool = field(check.boolean, default=False)
    name: str = field(check.name, default="PolynomialDecayWithOffset")

    def decayed(self, step):
        count = left_and_done_of_cycles if self.cycle else left_and_done
        left, done = count(step, self.decay_steps)
        left, done = shares(left, done, self.decay_steps)
        initial, end = self.initial_learning_rate, self.end_learning_rate
        if self.power == 1:
            power, rest = left, done
        else:
            power = ops.power(left, float32(self.power))
            # Where the rate falls the difference is accurate enough.
            rises = end > initial and self.power > 0
            rest = one_minus_power(left, done, self.power) if rises else 1 - power
        # Before the offset the terms of the sum would cancel each other.
        before = end + power * (initial - end)
        return ops.where(left > 1, before, power * initial + rest * end)


@declared("ExponentialDecayWithOffset")
class ExponentialDecayWithOffset(_WithOffset, schedules.ExponentialDecay):
    """`keras.optimizers.schedules.ExponentialDecay`, `offset` steps later.

    ```python
    rate = initial * decay_rate ** ((step - offset) / decay_steps)
    ```

    With `staircase=True` the exponent is rounded down. Each stair begins at its step,
    compiled as well, where those of Keras's own class may begin a step late.

    {{before_the_offset}}

    Args:
        staircase: Bool. Whether the rate falls in stairs.
        {{others}}

    Example:

    >>> from keras_lso.schedules import ExponentialDecayWithOffset
    >>> schedule = ExponentialDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=2, decay_rate=0.25
    ... )
    >>> [f"{float(schedule(step)):.2f}" for step in (9, 10, 11, 12)]
    ['2.00', '1.00', '0.50', '0.25']
    """

    keras_class = schedules.ExponentialDecay

    offset: int = field(check.integer, default=0)
    _: KW_ONLY
    initial_learning_rate: float = field(check.rate)
    decay_steps: int = field(check.positive_int)
    decay_rate: float = field(check.positive)
    staircase: bool = field(check.boolean, default=False)
    name: str = field(check.name, default="ExponentialDecayWithOffset")

    def decayed(self, step):
        stairs, rest = whole_and_rest(step, self.decay_steps)
        rate = power_of_rate(self.decay_rate, stairs) * self.initial_learning_rate
        if self.staircase:
            return rate
        return rate * ops.exp(rest * (math.log(self.decay_rate) / self.decay_steps))


@declared("CosineDecayWithOffset")
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

    Before the offset the formula extends backwards: put a warm-up in front.

    Args:
        alpha: Float. The last rate as a fraction of the highest one.
        warmup_target: Float. The rate to which a linear warm-up of its own leads.
            Defaults to `None`: no warm-up.
        {{others}}

    Example:

    >>> from keras_lso.schedules import CosineDecayWithOffset
    >>> schedule = CosineDecayWithOffset(10, initial_learning_rate=1.0, decay_steps=4)
    >>> [f"{float(schedule(step)):.3f}" for step in (10, 11, 12, 13, 14, 15)]
    ['1.000', '0.854', '0.500', '0.146', '0.000', '0.000']

    Reference:

    - [Loshchilov and Hutter, 2017, SGDR](https://arxiv.org/abs/1608.03983)
    """

    keras_class = schedules.CosineDecay

    offset: int = field(check.integer, default=0)
    _: KW_ONLY
    initial_learning_rate: float = field(check.rate)
    decay_steps: int = field(check.positive_int)
    alpha: float = field(check.rate, default=0.0)
    name: str = field(check.name, default="CosineDecayWithOffset")
    warmup_target: float | None = field(check.optional(check.rate), default=None)
    warmup_steps: int = field(check.non_negative_int, default=0)

    def decayed(self, step):
        if self.warmup_target is None:
            return self._cosine(step, self.initial_learning_rate)
        initial, target = self.initial_learning_rate, self.warmup_target
        rate = self._cosine(since(step, self.warmup_steps), target)
        return warmed_up(step, self.warmup_steps, initial, target, rate)

    def _cosine(self, step, top):
        left, done = left_and_done(step, self.decay_steps)
        left, done = shares(left, done, self.decay_steps)
        return top * (half_cosine(left) + self.alpha * half_cosine(done))
