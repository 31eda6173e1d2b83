"""Two schedules that `get` and the recipes make; `keras_lso.compat` has their names."""

from dataclasses import KW_ONLY, dataclass

from keras import ops
from keras.optimizers import schedules

from keras_lso._backend.types import Tensor
from keras_lso._core.fields import Count, Rate, registered
from keras_lso.schedules._curves import float32, one_minus_power, shares
from keras_lso.schedules._schedule import Schedule
from keras_lso.schedules._steps import elapsed, left_and_done, left_and_done_of_cycles


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
        count = left_and_done_of_cycles if self.cycle else left_and_done
        counts = count(elapsed(step, self.offset), self.decay_steps)
        left, done = shares(*counts, before=self.decay_steps)
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
