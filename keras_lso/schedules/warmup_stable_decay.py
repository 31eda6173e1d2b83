"""`WarmupStableDecay`: a warm-up, a long constant rate, and a short decay."""

from typing import Any, Literal

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import (
    cosine_between,
    exponential_between,
    line_between,
    root_between,
    shares,
    warmed_up,
)
from keras_lso.schedules._steps import elapsed, left_and_done_since

_CURVES = {
    "1-sqrt": root_between,
    "linear": line_between,
    "cosine": cosine_between,
    "exponential": exponential_between,
}


@keras.saving.register_keras_serializable("keras_lso", name="WarmupStableDecay")
class WarmupStableDecay(LearningRateSchedule):
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

    Each number of steps counts from the end of the previous phase. The length of the
    stable phase does not change its rates: a run can continue from a checkpoint of this
    phase with a larger `stable_steps`. It can also decay several times, to measure its
    progress.

    Args:
        learning_rate: The rate of the stable phase.
        warmup_steps: Zero or more. The number of steps (not epochs) of the warm-up.
            With 0 there is none.
        stable_steps: Zero or more. The number of steps after the warm-up during which
            the rate is constant.
        decay_steps: Positive. The number of steps after the stable phase during which
            the rate falls.
        decay: The curve of the decay: `"1-sqrt"`, `"linear"`, `"cosine"` or
            `"exponential"`. Defaults to `"1-sqrt"`.
        end_learning_rate: The rate after the decay. It must be above zero if the
            decay is exponential. Defaults to `0.0`.
        initial_learning_rate: The rate of step 0. Defaults to `0.0`.
        name: Defaults to `"WarmupStableDecay"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import WarmupStableDecay
    >>> schedule = WarmupStableDecay(
    ...     1.0, warmup_steps=2, stable_steps=3, decay_steps=4
    ... )
    >>> [f"{float(schedule(step)):.2f}" for step in range(10)]
    ['0.00', '0.50', '1.00', '1.00', '1.00', '1.00', '0.50', '0.29', '0.13', '0.00']

    References:

    - [Hu et al., 2024, MiniCPM](https://arxiv.org/abs/2404.06395)
    - [Hägele et al., 2024, Scaling Laws and Compute-Optimal Training Beyond Fixed
        Training Durations](https://arxiv.org/abs/2405.18392), for `"1-sqrt"`
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int,
        stable_steps: int,
        decay_steps: int,
        decay: Literal["1-sqrt", "linear", "cosine", "exponential"] = "1-sqrt",
        end_learning_rate: float = 0.0,
        initial_learning_rate: float = 0.0,
        name: str = "WarmupStableDecay",
    ) -> None:
        super().__init__()
        self.decay: str = check.choice("decay", decay, tuple(_CURVES))
        # An exponential curve never reaches zero.
        is_rate = check.positive_rate if self.decay == "exponential" else check.rate
        self.learning_rate: float = is_rate("learning_rate", learning_rate)
        self.warmup_steps: int = check.step("warmup_steps", warmup_steps)
        self.stable_steps: int = check.step("stable_steps", stable_steps)
        self.decay_steps: int = check.length("decay_steps", decay_steps)
        self.end_learning_rate: float = is_rate("end_learning_rate", end_learning_rate)
        self.initial_learning_rate: float = check.rate(
            "initial_learning_rate", initial_learning_rate
        )
        self.name: str = check.name(name, type(self))

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step)
        top, end = self.learning_rate, self.end_learning_rate
        start = self.warmup_steps + self.stable_steps
        left, done = shares(*left_and_done_since(steps, start, self.decay_steps))
        rate = _CURVES[self.decay](left, done, top, end)
        initial = self.initial_learning_rate
        return warmed_up(steps, self.warmup_steps, initial, top, rate)

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "stable_steps": self.stable_steps,
            "decay_steps": self.decay_steps,
            "decay": self.decay,
            "end_learning_rate": self.end_learning_rate,
            "initial_learning_rate": self.initial_learning_rate,
            "name": self.name,
        }
