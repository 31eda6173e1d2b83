"""`PolynomialDecayWithOffset`: Keras's polynomial decay, exact and with an offset."""

from typing import Any

import keras
from keras import ops
from keras.optimizers import schedules

from keras_lso._backend.types import Tensor
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import float32, one_minus_power, shares
from keras_lso.schedules._steps import (
    elapsed,
    left_and_done,
    left_and_done_of_cycles,
)


@keras.saving.register_keras_serializable("keras_lso", name="PolynomialDecayWithOffset")
class PolynomialDecayWithOffset(schedules.PolynomialDecay):
    """`keras.optimizers.schedules.PolynomialDecay`, `offset` steps later.

    ```python
    step = min(step - offset, decay_steps)
    rate = (initial - end) * (1 - step / decay_steps) ** power + end
    ```

    Before the offset the formula extends backwards, and the rate is above the initial
    rate: put a warm-up in front.

    With `cycle=True` the rate restarts: the first multiple of `decay_steps` that is not
    below the step then replaces `decay_steps`. Before the offset the rate is the
    initial rate; the Model Garden's rate is infinite or negative there.

    The rate is exact at the ends of the decay and of cycles, even when compiled.
    Keras's own class divides by a constant, and XLA multiplies by the rounded inverse
    of the constant: with a `power` below 1 the rate may then be NaN from `decay_steps`
    on.

    Args:
        offset: The step at which the schedule starts. Defaults to `0`.
        initial_learning_rate: The rate at the offset.
        decay_steps: Positive. The number of steps (not epochs) of the decay.
        end_learning_rate: The rate after the decay. Defaults to `0.0001`.
        power: The exponent, zero or more. Defaults to `1.0`: a straight line.
        cycle: Whether the rate restarts. Defaults to `False`.
        name: Defaults to `"PolynomialDecayWithOffset"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import PolynomialDecayWithOffset
    >>> schedule = PolynomialDecayWithOffset(
    ...     offset=10, initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0
    ... )
    >>> [float(schedule(step)) for step in (8, 10, 11, 12, 13, 14, 15)]
    [1.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    def __init__(
        self,
        offset: int = 0,
        *,
        initial_learning_rate: float,
        decay_steps: int,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        name: str = "PolynomialDecayWithOffset",
    ) -> None:
        self.offset: int = check.integer("offset", offset)
        super().__init__(
            check.rate("initial_learning_rate", initial_learning_rate),
            check.positive_int("decay_steps", decay_steps),
            end_learning_rate=check.rate("end_learning_rate", end_learning_rate),
            power=check.rate("power", power),
            cycle=check.boolean("cycle", cycle),
            name=check.name(name, type(self)),
        )

    # Not Keras's arithmetic, which counts and divides in the dtype of the rate.
    def __call__(self, step: int | Tensor) -> Tensor:
        count = left_and_done_of_cycles if self.cycle else left_and_done
        left, done = count(elapsed(step, self.offset), self.decay_steps)
        left, done = shares(left, done, self.decay_steps)
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

    def get_config(self) -> dict[str, Any]:
        return {"offset": self.offset, **super().get_config()}
