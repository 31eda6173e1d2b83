"""The optimizers and decays of the Model Garden's `official.modeling.optimization`.

They compute its rates, and load its configs. Four of them are Keras's decays, started
some steps later, and exact when compiled.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from keras import ops
from keras.optimizers import schedules

from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import LARGEST_STEP, check_list
from keras_lso._core.fields import Count, Positive, Rate, Real, Share, Step, registered
from keras_lso.optimizers.lamb import LAMB
from keras_lso.optimizers.lars import LARS
from keras_lso.schedules._schedule import (
    Schedule,
    Steps,
    check_boundaries,
    cosine_between,
    elapsed,
    float32,
    half_cosine,
    power_of_rate,
    power_of_step,
    shares,
    stairs,
    warmed_up,
)
from keras_lso.schedules.combined import LinearWarmup, PolynomialWarmup
from keras_lso.schedules.runs import PolynomialDecayWithOffset

__all__ = [
    "LAMB",
    "LARS",
    "CosineDecayWithOffset",
    "DirectPowerDecay",
    "ExponentialDecayWithOffset",
    "LinearWarmup",
    "PiecewiseConstantDecayWithOffset",
    "PolynomialDecayWithOffset",
    "PolynomialWarmUp",
    "PowerAndLinearDecay",
    "PowerDecayWithOffset",
    "StepCosineDecayWithOffset",
]


def __dir__() -> list[str]:
    return __all__


PolynomialWarmUp = PolynomialWarmup
"""The Model Garden's spelling, which its `optimizer_factory` uses."""


@registered("PiecewiseConstantDecayWithOffset")
@dataclass(eq=False)
class PiecewiseConstantDecayWithOffset(Schedule, schedules.PiecewiseConstantDecay):
    """`keras.optimizers.schedules.PiecewiseConstantDecay`, `offset` steps later.

    A boundary itself still belongs to the interval before it.

    Args:
        offset: The step at which the schedule starts. Defaults to `0`.
        boundaries: Strictly increasing. The last step of each interval but the last,
            counted from the offset.
        values: The rates, one more than `boundaries`.
        name: Defaults to `"PiecewiseConstantDecayWithOffset"`.

    Example:

    >>> from keras_lso.compat.model_garden import PiecewiseConstantDecayWithOffset
    >>> schedule = PiecewiseConstantDecayWithOffset(
    ...     offset=10, boundaries=[2, 4], values=[1.0, 0.5, 0.25]
    ... )
    >>> [float(schedule(step)) for step in (0, 10, 12, 13, 14, 15)]
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    """

    offset: int = 0
    _: KW_ONLY
    boundaries: Sequence[Step]
    values: Sequence[Rate]
    name: str = "PiecewiseConstantDecayWithOffset"

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(check_list("values", self.values, at_least=2)) - 1
        check_boundaries(self.boundaries, count, "one fewer than `values`")

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step, self.offset).rounded_up()
        return stairs(steps, self.boundaries, self.values)


@registered("ExponentialDecayWithOffset")
@dataclass(eq=False)
class ExponentialDecayWithOffset(Schedule, schedules.ExponentialDecay):
    """`keras.optimizers.schedules.ExponentialDecay`, `offset` steps later.

    Each stair begins at its step, even when compiled; Keras's may begin a step late.
    Before the offset the rate is above the initial one: put a warm-up in front.

    Args:
        offset: The step at which the schedule starts. Defaults to `0`.
        initial_learning_rate: The rate at the offset.
        decay_steps: Positive. The number of steps (not epochs) of the decay.
        decay_rate: Positive. The factor by which the rate changes in `decay_steps`.
        staircase: Whether the rate falls in stairs. Defaults to `False`.
        name: Defaults to `"ExponentialDecayWithOffset"`.

    Example:

    >>> from keras_lso.compat.model_garden import ExponentialDecayWithOffset
    >>> schedule = ExponentialDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=2, decay_rate=0.25
    ... )
    >>> [f"{float(schedule(step)):.2f}" for step in (9, 10, 11, 12)]
    ['2.00', '1.00', '0.50', '0.25']
    """

    offset: int = 0
    _: KW_ONLY
    initial_learning_rate: Rate
    decay_steps: Count
    decay_rate: Positive
    staircase: bool = False
    name: str = "ExponentialDecayWithOffset"

    def __call__(self, step: int | Tensor) -> Tensor:
        rest = elapsed(step, self.offset)
        stair = ops.zeros_like(rest.whole)
        if self.decay_steps <= LARGEST_STEP:
            stair = rest.whole // self.decay_steps
            rest = rest._replace(whole=rest.whole - stair * self.decay_steps)
        rate = power_of_rate(self.decay_rate, stair) * self.initial_learning_rate
        if self.staircase:
            return rate
        per_step = math.log(self.decay_rate) / self.decay_steps
        return rate * ops.exp(rest.in_float32() * per_step)


@registered("CosineDecayWithOffset")
@dataclass(eq=False)
class CosineDecayWithOffset(Schedule, schedules.CosineDecay):
    """`keras.optimizers.schedules.CosineDecay`, `offset` steps later.

    Before the offset the formula extends backwards: put a warm-up in front.

    Args:
        offset: The step at which the schedule starts. Defaults to `0`.
        initial_learning_rate: The rate at the offset.
        decay_steps: Positive. The number of steps (not epochs) of the decay.
        alpha: The last rate as a fraction of the highest one. Defaults to `0.0`.
        name: Defaults to `"CosineDecayWithOffset"`.
        warmup_target: The last rate of a linear warm-up. Defaults to `None`: none.
        warmup_steps: The steps (not epochs) of the warm-up. Defaults to `0`: none.

    Example:

    >>> from keras_lso.compat.model_garden import CosineDecayWithOffset
    >>> schedule = CosineDecayWithOffset(10, initial_learning_rate=1.0, decay_steps=4)
    >>> [f"{float(schedule(step)):.3f}" for step in (10, 11, 12, 13, 14, 15)]
    ['1.000', '0.854', '0.500', '0.146', '0.000', '0.000']
    """

    offset: int = 0
    _: KW_ONLY
    initial_learning_rate: Rate
    decay_steps: Count
    alpha: Rate = 0.0
    name: str = "CosineDecayWithOffset"
    warmup_target: Rate | None = None
    warmup_steps: Step = 0

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step, self.offset)
        initial, target = self.initial_learning_rate, self.warmup_target
        if target is None:
            return self._cosine(steps, initial)
        rate = self._cosine(steps.since(self.warmup_steps), target)
        return warmed_up(steps, self.warmup_steps, initial, target, rate)

    def _cosine(self, steps: Steps, top: float) -> Tensor:
        """Returns the rate of a decay from `top` some steps after its start."""
        counts = steps.left_and_done(self.decay_steps)
        left, done = shares(*counts, before=self.decay_steps)
        return top * (half_cosine(left) + self.alpha * half_cosine(done))


@registered("DirectPowerDecay")
@dataclass(eq=False)
class DirectPowerDecay(Schedule):
    """A learning rate that follows a power of the step.

    ```python
    rate = initial * max(step, 1) ** power
    ```

    Args:
        initial_learning_rate: The rate of steps 0 and 1.
        power: Negative for a rate that falls, such as `-0.5`. Defaults to `1.0`.
        name: Defaults to `"DirectPowerDecay"`.

    Example:

    >>> from keras_lso.compat.model_garden import DirectPowerDecay
    >>> schedule = DirectPowerDecay(1.0, power=-0.5)
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 4, 100)]
    ['1.00', '1.00', '0.50', '0.10']
    """

    initial_learning_rate: Rate
    power: Real = 1.0
    name: str = "DirectPowerDecay"

    def __call__(self, step: int | Tensor) -> Tensor:
        return self.initial_learning_rate * power_of_step(elapsed(step), self.power)


@registered("PowerAndLinearDecay")
@dataclass(eq=False)
class PowerAndLinearDecay(Schedule):
    """A learning rate that follows a power of the step, and ends in a line to zero.

    ```python
    step = step - offset
    rate = initial * max(step, 1) ** power
    tail = total_decay_steps * linear_decay_fraction
    if tail > 0:
        rate = max(rate * min((total_decay_steps - step) / tail, 1), 0)
    ```

    Before the offset the rate is the initial one.

    Args:
        initial_learning_rate: The rate of the first step.
        total_decay_steps: Positive. The steps from the offset to a rate of zero.
        power: The power of the step. Defaults to `1.0`.
        linear_decay_fraction: From 0 (no line) to 1. The fraction of the steps, at the
            end, in which a line to zero multiplies the rate. Defaults to `0.1`.
        offset: The step at which the schedule starts. Defaults to `0`.
        name: Defaults to `"PowerAndLinearDecay"`.

    Example:

    >>> from keras_lso.compat.model_garden import PowerAndLinearDecay
    >>> schedule = PowerAndLinearDecay(1.0, 8, power=0.0, linear_decay_fraction=0.5)
    >>> [float(schedule(step)) for step in (0, 4, 5, 6, 7, 8, 9)]
    [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    initial_learning_rate: Rate
    total_decay_steps: Count
    power: Real = 1.0
    linear_decay_fraction: Share = 0.1
    offset: int = 0
    name: str = "PowerAndLinearDecay"

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step, self.offset)
        rate = self.initial_learning_rate * power_of_step(steps, self.power)
        tail = self.total_decay_steps * self.linear_decay_fraction
        if tail == 0:
            return rate
        left, _ = steps.left_and_done(self.total_decay_steps)
        # A tail shorter than a step contains no step, and may underflow in float32.
        tail = max(tail, 1e-6)
        rate = ops.where(left < tail, rate * (left / tail), rate)
        # A power may be infinite, and infinity times zero is NaN.
        return ops.where(left > 0, rate, float32(0))


@registered("PowerDecayWithOffset")
@dataclass(eq=False)
class PowerDecayWithOffset(Schedule):
    """A learning rate that follows a power of the steps since the offset.

    ```python
    rate = min(initial * (step - offset) ** power, pre_offset)  # After the offset.
    ```

    Args:
        initial_learning_rate: The rate a step after the offset.
        power: Negative for a rate that falls, such as `-0.5`. Defaults to `1.0`.
        offset: The last step before the decay. Defaults to `0`.
        pre_offset_learning_rate: The rate up to the offset, and the highest afterwards.
            Defaults to `1e6`, which does not train: set it, or warm up past the offset.
        name: Defaults to `"PowerDecayWithOffset"`.

    Example:

    >>> from keras_lso.compat.model_garden import PowerDecayWithOffset
    >>> schedule = PowerDecayWithOffset(1.0, -0.5, 10, pre_offset_learning_rate=2.0)
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 10, 11, 14, 110)]
    ['2.00', '2.00', '1.00', '0.50', '0.10']
    """

    initial_learning_rate: Rate
    power: Real = 1.0
    offset: int = 0
    pre_offset_learning_rate: Rate = 1.0e6
    name: str = "PowerDecayWithOffset"

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step, self.offset)
        rate = self.initial_learning_rate * power_of_step(steps, self.power)
        highest = float32(self.pre_offset_learning_rate)
        return ops.where(steps.in_float32() > 0, ops.minimum(rate, highest), highest)


@registered("StepCosineDecayWithOffset")
@dataclass(eq=False)
class StepCosineDecayWithOffset(Schedule):
    """A learning rate that moves along half cosines from each value to the next.

    ```python
    # From boundaries[i] to boundaries[i + 1], `start` and `end`:
    cosine = (1 + cos(pi * (step - offset - start) / (end - start))) / 2
    rate = values[i + 1] + (values[i] - values[i + 1]) * cosine
    ```

    As in the Model Garden, the first cosine starts at step 0 whatever `boundaries[0]`
    is, so start the list with 0; before the offset the cosine is mirrored. After the
    last boundary, where the Model Garden's rate is NaN, it stays at the last value.

    Args:
        boundaries: Strictly increasing steps, counted from the offset.
        values: The rate at each boundary.
        offset: The step at which the schedule starts. Defaults to `0`.
        name: Defaults to `"StepCosineDecayWithOffset"`.

    Example:

    >>> from keras_lso.compat.model_garden import StepCosineDecayWithOffset
    >>> schedule = StepCosineDecayWithOffset([0, 4, 6], values=[1.0, 0.5, 0.0])
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 2, 3, 4, 5, 6, 7)]
    ['1.00', '0.93', '0.75', '0.57', '0.50', '0.25', '0.00', '0.00']
    """

    boundaries: Sequence[Step]
    values: Sequence[Rate]
    offset: int = 0
    name: str = "StepCosineDecayWithOffset"

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(check_list("values", self.values, at_least=1))
        check_boundaries(self.boundaries, count, "as many as `values`")

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step, self.offset)
        # Long before the offset the difference from a boundary would wrap around.
        steps = steps.clipped(self.boundaries[-1] - LARGEST_STEP)
        rate = float32(self.values[-1])
        points = zip(self.boundaries, map(float32, self.values), strict=True)
        for (start, value), (end, next_value) in reversed([*pairwise(points)]):
            # As in the Model Garden, whatever the first boundary is.
            done = steps.since(start if start > self.boundaries[0] else 0)
            left = done.left_to(end - start)
            left, done = shares(left, done.in_float32(), before=end - start)
            cosine = cosine_between(left, done, value, next_value)
            rate = ops.where(steps.is_before(end), cosine, rate)
        return rate
