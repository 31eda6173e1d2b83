"""`Cyclical`: up and down between two rates, repeatedly."""

import math
from typing import Any, Literal

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso._core.checks import LARGEST_STEP, check_bounds
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import line_between, power_of_rate, shares
from keras_lso.schedules._steps import clipped, elapsed

_MODES = ("triangular", "triangular2", "exponential")


@keras.saving.register_keras_serializable("keras_lso", name="Cyclical")
class Cyclical(LearningRateSchedule):
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

    A cycle begins and ends at `low`. These are the rates of PyTorch's `CyclicLR` with
    `step_size_up=half_cycle` and of TensorFlow Addons' `CyclicalLearningRate` with
    `step_size=half_cycle`.

    Args:
        low: The rate at the ends of cycles.
        high: Not below `low`. The rate in the middle of the first cycle; with
            `mode="exponential"`, before `gamma` lowers it.
        half_cycle: Positive. The number of steps (not epochs) from `low` to `high`, and
            from `high` to `low`.
        mode: `"triangular"`: all cycles are alike. `"triangular2"`: each cycle is half
            as high as the previous one. `"exponential"`: the height of a cycle is
            multiplied by `gamma` at each step. Defaults to `"triangular"`.
        gamma: Positive, and at most 1, such as 0.9999. Only for `mode="exponential"`.
            Defaults to `1.0`.
        name: Defaults to `"Cyclical"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import Cyclical
    >>> schedule = Cyclical(0.0, 1.0, half_cycle=2, mode="triangular2")
    >>> [float(schedule(step)) for step in range(9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25, 0.0]

    Reference:

    - [Smith, 2017, Cyclical Learning Rates for Training Neural Networks](
        https://arxiv.org/abs/1506.01186)
    """

    def __init__(
        self,
        low: float,
        high: float,
        half_cycle: int,
        mode: Literal["triangular", "triangular2", "exponential"] = "triangular",
        gamma: float = 1.0,
        name: str = "Cyclical",
    ) -> None:
        super().__init__()
        self.low: float = check.rate("low", low)
        self.high: float = check.rate("high", high)
        check_bounds(self.low, self.high, names=("low", "high"))
        self.half_cycle: int = check.length("half_cycle", half_cycle)
        self.mode: str = check.choice("mode", mode, _MODES)
        self.gamma: float = check.at_most_one("gamma", gamma)
        if self.gamma < 1 and self.mode != "exponential":
            raise ValueError(
                '`gamma` is only for `mode="exponential"`. Write this mode, or leave '
                f"`gamma` out. Received: gamma={gamma!r}, mode={mode!r}"
            )
        self.name: str = check.name(name, type(self))

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = clipped(elapsed(step), 0, LARGEST_STEP)
        cycle, rest = self._cycle_and_rest(steps.whole)
        # As integers: `left` is the number of steps to or from the middle.
        from_middle = rest - self.half_cycle
        left = ops.cast(ops.abs(from_middle), "float32")
        done = ops.cast(self.half_cycle - ops.abs(from_middle), "float32")
        if steps.fraction is not None:
            change = ops.where(from_middle < 0, steps.fraction, -steps.fraction)
            left, done = left - change, done + change
        left, done = shares(left, done)
        return line_between(left, done, self.low, self._highest(steps, cycle))

    def _cycle_and_rest(self, step):
        """Returns the number of cycles before a step, and the steps since then."""
        length = 2 * self.half_cycle
        if length > LARGEST_STEP:
            return ops.zeros_like(step), step
        return step // length, step % length

    def _highest(self, steps, cycle):
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

    def get_config(self) -> dict[str, Any]:
        return {
            "low": self.low,
            "high": self.high,
            "half_cycle": self.half_cycle,
            "mode": self.mode,
            "gamma": self.gamma,
            "name": self.name,
        }
