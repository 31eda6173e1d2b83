"""`WarmupCosine`: a warm-up, then half a cosine."""

from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import cosine_between, shares, warmed_up
from keras_lso.schedules._steps import elapsed, left_and_done_since


@keras.saving.register_keras_serializable("keras_lso", name="WarmupCosine")
class WarmupCosine(LearningRateSchedule):
    """Warms the learning rate up, then lets it decay along half a cosine.

    ```python
    if step < warmup_steps:
        rate = initial + step / warmup_steps * (learning_rate - initial)
    else:
        x = min((step - warmup_steps) / decay_steps, 1)
        rate = end + (learning_rate - end) * (1 + cos(pi * x)) / 2
    ```

    `decay_steps` counts from the end of the warm-up, so a run has `warmup_steps +
    decay_steps` steps.

    Args:
        learning_rate: The highest rate, at the end of the warm-up.
        warmup_steps: Zero or more. The number of steps (not epochs) of the warm-up.
            With 0 there is none.
        decay_steps: Positive. The number of steps after the warm-up during which the
            rate falls.
        end_learning_rate: The rate after the decay. Defaults to `0.0`.
        initial_learning_rate: The rate of step 0. Defaults to `0.0`.
        name: Defaults to `"WarmupCosine"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import WarmupCosine
    >>> schedule = WarmupCosine(1.0, warmup_steps=2, decay_steps=4)
    >>> [f"{float(schedule(step)):.3f}" for step in range(8)]
    ['0.000', '0.500', '1.000', '0.854', '0.500', '0.146', '0.000', '0.000']

    Reference:

    - [Loshchilov and Hutter, 2017, SGDR](https://arxiv.org/abs/1608.03983)
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int,
        decay_steps: int,
        end_learning_rate: float = 0.0,
        initial_learning_rate: float = 0.0,
        name: str = "WarmupCosine",
    ) -> None:
        super().__init__()
        self.learning_rate: float = check.rate("learning_rate", learning_rate)
        self.warmup_steps: int = check.step("warmup_steps", warmup_steps)
        self.decay_steps: int = check.length("decay_steps", decay_steps)
        self.end_learning_rate: float = check.rate(
            "end_learning_rate", end_learning_rate
        )
        self.initial_learning_rate: float = check.rate(
            "initial_learning_rate", initial_learning_rate
        )
        self.name: str = check.name(name, type(self))

    def __call__(self, step: int | Tensor) -> Tensor:
        steps, start = elapsed(step), self.warmup_steps
        left, done = shares(*left_and_done_since(steps, start, self.decay_steps))
        top = self.learning_rate
        rate = cosine_between(left, done, top, self.end_learning_rate)
        return warmed_up(steps, start, self.initial_learning_rate, top, rate)

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            "end_learning_rate": self.end_learning_rate,
            "initial_learning_rate": self.initial_learning_rate,
            "name": self.name,
        }
