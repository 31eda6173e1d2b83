"""Schedules of whole runs, under their usual names.

`FixedLR` and `PolynomialDecayWithOffset` have their names in `keras_lso.compat`.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from keras import ops
from keras.optimizers import schedules

from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import LARGEST_STEP, check_bounds, check_rate, refusal
from keras_lso._core.fields import (
    Count,
    Length,
    Positive,
    Rate,
    Share,
    Step,
    registered,
)
from keras_lso.schedules._schedule import (
    Schedule,
    Steps,
    cosine_between,
    elapsed,
    float32,
    line_between,
    one_minus_power,
    power_of_rate,
    shares,
    warmed_up,
)


def _root_between(left: Tensor, done: Tensor, start: float, end: float) -> Tensor:
    """Returns the rate on `1 - sqrt(done)` from `start` to `end`."""
    root = ops.sqrt(done)
    # `1 - root` would lose digits near the end.
    return line_between(left / (1 + root), root, start, end)


def _exponential_between(
    left: Tensor, done: Tensor, start: float, end: float
) -> Tensor:
    """Returns the rate on the exponential from `start` to `end`, both positive."""
    growth = math.log(end) - math.log(start)
    # From the nearer end, so that the exponent is small, and 0 at both ends.
    from_start = start * ops.exp(ops.minimum(done, float32(0.5)) * growth)
    from_end = end * ops.exp(ops.minimum(left, float32(0.5)) * -growth)
    return ops.where(done < 0.5, from_start, from_end)


_CURVES = {
    "1-sqrt": _root_between,
    "linear": line_between,
    "cosine": cosine_between,
    "exponential": _exponential_between,
}


@registered("WarmupStableDecay")
@dataclass(eq=False)
class WarmupStableDecay(Schedule):
    """Warms the learning rate up, keeps it, and lets it decay (WSD, the trapezoid).

    ```python
    if step < warmup_steps:
        rate = initial + step / warmup_steps * (learning_rate - initial)
    else:
        x = (step - warmup_steps - stable_steps) / decay_steps, between 0 and 1
        if decay == "1-sqrt": left = 1 - sqrt(x)
        if decay == "linear": left = 1 - x
        if decay == "cosine": left = (1 + cos(pi * x)) / 2
        rate = end + (learning_rate - end) * left
        if decay == "exponential": rate = learning_rate * (end / learning_rate) ** x
    ```

    A run can continue from a checkpoint of its stable phase with more `stable_steps`.

    Args:
        learning_rate: The rate of the stable phase.
        warmup_steps: The steps (not epochs) of the warm-up, 0 or more.
        stable_steps: The steps of the stable phase, after the warm-up, 0 or more.
        decay_steps: Positive. The steps of the decay, after the stable phase.
        decay: One of the curves above. Defaults to `"1-sqrt"`.
        end_learning_rate: The rate after the decay, for `decay="exponential"` above 0.
            Defaults to `0.0`.
        initial_learning_rate: The rate of step 0. Defaults to `0.0`.
        name: Defaults to `"WarmupStableDecay"`.

    Example:

    >>> from keras_lso.schedules import WarmupStableDecay
    >>> schedule = WarmupStableDecay(1.0, 2, stable_steps=3, decay_steps=4)
    >>> [f"{float(schedule(step)):.2f}" for step in range(10)]
    ['0.00', '0.50', '1.00', '1.00', '1.00', '1.00', '0.50', '0.29', '0.13', '0.00']

    References:

    - [Hu et al., 2024, MiniCPM](https://arxiv.org/abs/2404.06395)
    - [Hägele et al., 2024](https://arxiv.org/abs/2405.18392), for `"1-sqrt"`
    """

    learning_rate: Rate
    warmup_steps: Step
    stable_steps: Step
    decay_steps: Length
    decay: Literal["1-sqrt", "linear", "cosine", "exponential"] = "1-sqrt"
    end_learning_rate: Rate = 0.0
    initial_learning_rate: Rate = 0.0
    name: str = "WarmupStableDecay"

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement = "be above zero if the decay is exponential"
        for argument in ("learning_rate", "end_learning_rate"):
            rate = getattr(self, argument)
            if rate == 0 and self.decay == "exponential":
                raise refusal(argument, rate, requirement)

    def __call__(self, step: int | Tensor) -> Tensor:
        return _rate_of_run(self, step, self.stable_steps, self.decay)


def _rate_of_run(
    schedule: Any, step: int | Tensor, stable_steps: int, decay: str
) -> Tensor:
    """Returns the rate of a run: a warm-up, a stable phase and a decay."""
    steps = elapsed(step)
    top, warmup_steps = schedule.learning_rate, schedule.warmup_steps
    later = steps.since(warmup_steps + stable_steps).clipped()
    left, done = shares(*later.left_and_done(schedule.decay_steps))
    rate = _CURVES[decay](left, done, top, schedule.end_learning_rate)
    return warmed_up(steps, warmup_steps, schedule.initial_learning_rate, top, rate)


@registered("WarmupCosine")
@dataclass(eq=False)
class WarmupCosine(Schedule):
    """Warms the learning rate up, then lets it decay along half a cosine.

    It is a `WarmupStableDecay` with `stable_steps=0` and `decay="cosine"`.

    Args:
        learning_rate: The highest rate, at the end of the warm-up.
        warmup_steps: The steps (not epochs) of the warm-up, 0 or more.
        decay_steps: Positive. The steps of the decay, after the warm-up.
        end_learning_rate: The rate after the decay. Defaults to `0.0`.
        initial_learning_rate: The rate of step 0. Defaults to `0.0`.
        name: Defaults to `"WarmupCosine"`.

    Example:

    >>> from keras_lso.schedules import WarmupCosine
    >>> schedule = WarmupCosine(1.0, warmup_steps=2, decay_steps=4)
    >>> [f"{float(schedule(step)):.3f}" for step in range(8)]
    ['0.000', '0.500', '1.000', '0.854', '0.500', '0.146', '0.000', '0.000']

    Reference:

    - [Loshchilov and Hutter, 2017, SGDR](https://arxiv.org/abs/1608.03983)
    """

    learning_rate: Rate
    warmup_steps: Step
    decay_steps: Length
    end_learning_rate: Rate = 0.0
    initial_learning_rate: Rate = 0.0
    name: str = "WarmupCosine"

    def __call__(self, step: int | Tensor) -> Tensor:
        return _rate_of_run(self, step, 0, "cosine")


@registered("InverseSquareRoot")
@dataclass(eq=False)
class InverseSquareRoot(Schedule):
    """Warms the learning rate up, then divides it by the square root of the step.

    ```python
    if step < warmup_steps:
        rate = learning_rate * step / warmup_steps
    else:
        rate = learning_rate * sqrt(timescale / (step + timescale - warmup_steps))
    ```

    With `timescale=None` this is the schedule of the Transformer.

    Args:
        learning_rate: The highest rate, at the end of the warm-up.
        warmup_steps: The steps (not epochs) of the warm-up, 0 or more.
        timescale: Positive. The unit of the decay: after three times as many steps the
            rate has halved. Defaults to `None`: `warmup_steps`, or 10,000 without any.
        name: Defaults to `"InverseSquareRoot"`.

    Example:

    >>> from keras_lso.schedules import InverseSquareRoot
    >>> schedule = InverseSquareRoot(1.0, warmup_steps=4)
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 2, 4, 9, 16, 64)]
    ['0.00', '0.25', '0.50', '1.00', '0.67', '0.50', '0.25']

    References:

    - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    - [Zhai et al., 2022](https://arxiv.org/abs/2106.04560), for the `timescale`
    """

    learning_rate: Rate
    warmup_steps: Step
    timescale: Length | None = None
    name: str = "InverseSquareRoot"

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step)
        timescale = self.timescale or self.warmup_steps or 10_000
        later = steps.since(self.warmup_steps).clipped()
        part, done = shares(float32(float(timescale)), later.in_float32())
        top = self.learning_rate
        # TensorFlow may replace the division and the root by an approximate `rsqrt`.
        rate = ops.where(done > 0, top * ops.sqrt(part), float32(top))
        return warmed_up(steps, self.warmup_steps, 0.0, top, rate)


@registered("OneCycle")
@dataclass(eq=False)
class OneCycle(Schedule):
    """Raises the learning rate to its maximum once, then lowers it to almost nothing.

    ```python
    initial = max_learning_rate / div_factor
    end = initial / final_div_factor
    top, last = warmup_share * total_steps - 1, total_steps - 1
    if step <= top:
        rate moves from initial to max_learning_rate, in proportion to step / top
    else:
        rate moves from max_learning_rate to end, (step - top) / (last - top)
    ```

    These are the rates of PyTorch's `OneCycleLR`; the momentum does not move.

    Args:
        max_learning_rate: The highest rate.
        total_steps: Positive. The steps (not epochs) of the run.
        warmup_share: The share of the steps in which it rises. Defaults to `0.3`.
        div_factor: Positive. The highest rate divided by the first. Defaults to `25.0`.
        final_div_factor: Positive. The first rate over the last. Defaults to `10000.0`.
        anneal: `"cosine"` or `"linear"`, for both moves. Defaults to `"cosine"`.
        name: Defaults to `"OneCycle"`.

    Example:

    >>> from keras_lso.schedules import OneCycle
    >>> schedule = OneCycle(1.0, total_steps=10, div_factor=5.0)
    >>> [f"{float(schedule(step)):.2f}" for step in range(10)]
    ['0.20', '0.60', '1.00', '0.95', '0.81', '0.61', '0.39', '0.19', '0.05', '0.00']

    Reference:

    - [Smith and Topin, 2018, Super-Convergence](https://arxiv.org/abs/1708.07120)
    """

    max_learning_rate: Rate
    total_steps: Length
    warmup_share: Share = 0.3
    div_factor: Positive = 25.0
    final_div_factor: Positive = 1e4
    anneal: Literal["cosine", "linear"] = "cosine"
    name: str = "OneCycle"

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.max_learning_rate / self.div_factor
        end = first / self.final_div_factor
        check_rate("max_learning_rate / div_factor", first)
        check_rate("max_learning_rate / div_factor / final_div_factor", end)
        self._first, self._end = first, end

    def __call__(self, step: int | Tensor) -> Tensor:
        curve, highest = _CURVES[self.anneal], self.max_learning_rate
        last = self.total_steps - 1
        # The top is seldom a whole step. It is rounded, since 0.29 * 100 is below 29.
        top = round(self.warmup_share * self.total_steps, 6) - 1
        steps = elapsed(step).clipped(0, last)
        to_top = steps.left_to(top)
        # A phase without steps has no shares.
        rising = falling = float32(highest)
        if top > 0:
            left, done = shares(to_top, steps.in_float32())
            rising = curve(left, done, self._first, highest)
        if top < last:
            to_end, _ = steps.left_and_done(last)
            left, done = shares(to_end, -to_top)
            falling = curve(left, done, highest, self._end)
        return ops.where(to_top >= 0, rising, falling)


@registered("Cyclical")
@dataclass(eq=False)
class Cyclical(Schedule):
    """Moves the learning rate up and down between two rates, along straight lines.

    ```python
    cycle = step // (2 * half_cycle)                        # 0 is the first one
    rest = step % (2 * half_cycle)
    share = min(rest, 2 * half_cycle - rest) / half_cycle   # of the way up
    if mode == "triangular": height = 1
    if mode == "triangular2": height = 0.5 ** cycle
    if mode == "exponential": height = gamma ** step
    rate = low + (high - low) * height * share
    ```

    Args:
        low: The rate at the ends of cycles.
        high: The rate in the middle of the first cycle, at least `low`.
        half_cycle: Positive. The steps (not epochs) from `low` to `high`, and back.
        mode: One of the modes above. Defaults to `"triangular"`.
        gamma: Above 0 and at most 1, for `mode="exponential"`. Defaults to `1.0`.
        name: Defaults to `"Cyclical"`.

    Example:

    >>> from keras_lso.schedules import Cyclical
    >>> schedule = Cyclical(0.0, 1.0, half_cycle=2, mode="triangular2")
    >>> [float(schedule(step)) for step in range(9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25, 0.0]

    Reference:

    - [Smith, 2017, Cyclical Learning Rates](https://arxiv.org/abs/1506.01186)
    """

    low: Rate
    high: Rate
    half_cycle: Length
    mode: Literal["triangular", "triangular2", "exponential"] = "triangular"
    gamma: Positive = 1.0
    name: str = "Cyclical"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self.low, self.high, names=("low", "high"))
        if self.gamma > 1:
            raise refusal("gamma", self.gamma, "be at most 1")
        if self.gamma < 1 and self.mode != "exponential":
            raise refusal("gamma", self.gamma, 'be 1 unless `mode="exponential"`')

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step).clipped()
        cycle, rest = ops.zeros_like(steps.whole), steps.whole
        if 2 * self.half_cycle <= LARGEST_STEP:
            cycle, rest = rest // (2 * self.half_cycle), rest % (2 * self.half_cycle)
        # As integers: `left` is the number of steps to or from the middle.
        left = ops.abs(rest - self.half_cycle)
        done = ops.cast(self.half_cycle - left, "float32")
        left = ops.cast(left, "float32")
        if steps.fraction is not None:
            rises = rest < self.half_cycle
            change = ops.where(rises, steps.fraction, -steps.fraction)
            left, done = left - change, done + change
        left, done = shares(left, done)
        return line_between(left, done, self.low, self._highest(steps, cycle))

    def _highest(self, steps: Steps, cycle: Tensor) -> Tensor | float:
        """Returns the rate at the peak of the cycle, as of this step."""
        if self.mode == "triangular":
            return self.high
        if self.mode == "triangular2":
            height = power_of_rate(0.5, cycle)
        else:
            height = power_of_rate(self.gamma, steps.whole)
            if steps.fraction is not None:
                height = height * ops.exp(steps.fraction * math.log(self.gamma))
        return line_between(1 - height, height, self.low, self.high)


@registered("FixedLR")
@dataclass(eq=False)
class FixedLR(Schedule):
    """OpenSeq2Seq's `fixed_lr`: the same rate at every step.

    Args:
        learning_rate: The rate.
        name: Defaults to `"FixedLR"`.

    Example:

    >>> from keras_lso.compat.open_seq2seq import FixedLR
    >>> schedule = FixedLR(0.25)
    >>> float(schedule(0)), float(schedule(1_000_000))
    (0.25, 0.25)
    """

    learning_rate: Rate
    name: str = "FixedLR"

    # It does not count steps. `LossScaleOptimizer` checks this before it warns.
    _counts_micro_batches = False

    def __call__(self, step: int | Tensor) -> Tensor:
        return float32(self.learning_rate)


@registered("PolynomialDecayWithOffset")
@dataclass(eq=False)
class PolynomialDecayWithOffset(Schedule, schedules.PolynomialDecay):
    """`keras.optimizers.schedules.PolynomialDecay`, `offset` steps later.

    Before the offset the curve extends backwards, or, with `cycle=True`, the rate is
    the initial one: put a warm-up in front. Unlike the rates of Keras's own class,
    those at the ends of the decay and of cycles are exact when compiled.

    Args:
        offset: The step at which the schedule starts. Defaults to `0`.
        initial_learning_rate: The rate at the offset.
        decay_steps: Positive. The steps (not epochs) of the decay.
        end_learning_rate: The rate after the decay. Defaults to `0.0001`.
        power: The exponent, zero or more. Defaults to `1.0`: a straight line.
        cycle: Whether the rate restarts, as in Keras's class. Defaults to `False`.
        name: Defaults to `"PolynomialDecayWithOffset"`.

    Example:

    >>> from keras_lso.compat.model_garden import PolynomialDecayWithOffset
    >>> schedule = PolynomialDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0
    ... )
    >>> [float(schedule(step)) for step in (8, 10, 11, 12, 13, 14, 15)]
    [1.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    offset: int = 0
    _: KW_ONLY
    initial_learning_rate: Rate
    decay_steps: Count
    end_learning_rate: Rate = 0.0001
    power: Rate = 1.0
    cycle: bool = False
    name: str = "PolynomialDecayWithOffset"

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step, self.offset)
        count = steps.left_and_done_of_cycles if self.cycle else steps.left_and_done
        left, done = shares(*count(self.decay_steps), before=self.decay_steps)
        initial, end = self.initial_learning_rate, self.end_learning_rate
        if self.power == 1:
            power, rest = left, done
        else:
            power = ops.power(left, float32(self.power))
            # If the rate falls, the difference is accurate enough.
            rises = end > initial and self.power > 0
            rest = one_minus_power(left, done, self.power) if rises else 1 - power
        # Before the offset the terms of the sum would cancel each other.
        before = end + power * (initial - end)
        return ops.where(left > 1, before, power * initial + rest * end)
