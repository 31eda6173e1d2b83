"""`OneCycle`: up to a high rate once, and down to almost nothing."""

from typing import Any, Literal

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import (
    cosine_between,
    float32,
    line_between,
    shares,
)
from keras_lso.schedules._steps import (
    clipped,
    elapsed,
    in_float32,
    left_and_done,
    steps_to,
)

_CURVES = {"cosine": cosine_between, "linear": line_between}


@keras.saving.register_keras_serializable("keras_lso", name="OneCycle")
class OneCycle(LearningRateSchedule):
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

    Both moves follow half a cosine, or a straight line with `anneal="linear"`. The last
    of `total_steps` steps, step `total_steps - 1`, and all later steps have the lowest
    rate. These are the rates of PyTorch's `OneCycleLR`. PyTorch's class also moves the
    momentum, against the rate, unless it has `cycle_momentum=False`. A Keras schedule
    moves only the rate.

    Args:
        max_learning_rate: The highest rate.
        total_steps: Positive. The number of steps (not epochs) of the run.
        warmup_share: From 0 to 1. The share of the steps during which the rate rises.
            Defaults to `0.3`.
        div_factor: Positive. The ratio of the highest rate to the rate of step 0.
            Defaults to `25.0`.
        final_div_factor: Positive. The ratio of the rate of step 0 to the last rate.
            Defaults to `10000.0`.
        anneal: The curve of both phases: `"cosine"` or `"linear"`. Defaults to
            `"cosine"`.
        name: Defaults to `"OneCycle"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import OneCycle
    >>> schedule = OneCycle(1.0, total_steps=10, div_factor=5.0)
    >>> [f"{float(schedule(step)):.2f}" for step in range(10)]
    ['0.20', '0.60', '1.00', '0.95', '0.81', '0.61', '0.39', '0.19', '0.05', '0.00']

    Reference:

    - [Smith and Topin, 2018, Super-Convergence](https://arxiv.org/abs/1708.07120)
    """

    def __init__(
        self,
        max_learning_rate: float,
        total_steps: int,
        warmup_share: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        anneal: Literal["cosine", "linear"] = "cosine",
        name: str = "OneCycle",
    ) -> None:
        super().__init__()
        self.max_learning_rate: float = check.rate(
            "max_learning_rate", max_learning_rate
        )
        self.total_steps: int = check.length("total_steps", total_steps)
        self.warmup_share: float = check.share("warmup_share", warmup_share)
        self.div_factor: float = check.positive("div_factor", div_factor)
        self.final_div_factor: float = check.positive(
            "final_div_factor", final_div_factor
        )
        self.anneal: str = check.choice("anneal", anneal, tuple(_CURVES))
        self.name: str = check.name(name, type(self))
        check.rate("max_learning_rate / div_factor", self._initial)
        check.rate("max_learning_rate / div_factor / final_div_factor", self._end)

    @property
    def _initial(self):
        return self.max_learning_rate / self.div_factor

    @property
    def _end(self):
        return self._initial / self.final_div_factor

    def __call__(self, step: int | Tensor) -> Tensor:
        curve, highest = _CURVES[self.anneal], self.max_learning_rate
        last = self.total_steps - 1
        # The top is seldom a whole step. It is rounded, since 0.29 * 100 is below 29.
        top = round(self.warmup_share * self.total_steps, 6) - 1
        steps = clipped(elapsed(step), 0, last)
        to_top = steps_to(steps, top)
        # A phase without steps has no shares.
        rising = falling = float32(highest)
        if top > 0:
            left, done = shares(to_top, in_float32(steps))
            rising = curve(left, done, self._initial, highest)
        if top < last:
            to_end, _ = left_and_done(steps, last)
            left, done = shares(to_end, -to_top)
            falling = curve(left, done, highest, self._end)
        return ops.where(to_top >= 0, rising, falling)

    def get_config(self) -> dict[str, Any]:
        return {
            "max_learning_rate": self.max_learning_rate,
            "total_steps": self.total_steps,
            "warmup_share": self.warmup_share,
            "div_factor": self.div_factor,
            "final_div_factor": self.final_div_factor,
            "anneal": self.anneal,
            "name": self.name,
        }
