"""`InverseSquareRoot`: a warm-up, then a decay without an end."""

from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso._core.checks import LARGEST_STEP
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import float32, shares, warmed_up
from keras_lso.schedules._steps import clipped, elapsed, in_float32, since

_DEFAULT_TIMESCALE = 10_000


@keras.saving.register_keras_serializable("keras_lso", name="InverseSquareRoot")
class InverseSquareRoot(LearningRateSchedule):
    """Warms the learning rate up, then divides it by the square root of the step.

    ```python
    if step < warmup_steps:
        rate = learning_rate * step / warmup_steps
    else:
        rate = learning_rate * sqrt(timescale / (step + timescale - warmup_steps))
    ```

    With `timescale=None` this is the schedule of the Transformer,
    `learning_rate * min(step / warmup_steps, sqrt(warmup_steps / step))`. After three
    times the `timescale`, the rate has fallen to half of the highest rate. The rate
    does not depend on the total number of steps: a run may end at any step.

    Args:
        learning_rate: The highest rate, at the end of the warm-up.
        warmup_steps: Zero or more. The number of steps (not epochs) of the warm-up.
            With 0 there is none.
        timescale: Positive. The unit of the decay, in steps: the larger it is, the more
            slowly the rate falls. Defaults to `None`: `warmup_steps`, or 10,000 without
            a warm-up.
        name: Defaults to `"InverseSquareRoot"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import InverseSquareRoot
    >>> schedule = InverseSquareRoot(1.0, warmup_steps=4)
    >>> [f"{float(schedule(step)):.2f}" for step in (0, 1, 2, 4, 9, 16, 64)]
    ['0.00', '0.25', '0.50', '1.00', '0.67', '0.50', '0.25']

    References:

    - [Vaswani et al., 2017, Attention Is All You Need](
        https://arxiv.org/abs/1706.03762)
    - [Zhai et al., 2022, Scaling Vision Transformers](
        https://arxiv.org/abs/2106.04560), for the `timescale`
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int,
        timescale: int | None = None,
        name: str = "InverseSquareRoot",
    ) -> None:
        super().__init__()
        self.learning_rate: float = check.rate("learning_rate", learning_rate)
        self.warmup_steps: int = check.step("warmup_steps", warmup_steps)
        self.timescale: int | None = check.optional(
            check.length, "timescale", timescale
        )
        self.name: str = check.name(name, type(self))

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = elapsed(step)
        timescale = self.timescale or self.warmup_steps or _DEFAULT_TIMESCALE
        later = clipped(since(steps, self.warmup_steps), 0, LARGEST_STEP)
        part, done = shares(float32(float(timescale)), in_float32(later))
        top = self.learning_rate
        # TensorFlow may replace the division and the root by an approximate `rsqrt`.
        rate = ops.where(done > 0, top * ops.sqrt(part), float32(top))
        return warmed_up(steps, self.warmup_steps, 0.0, top, rate)

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "timescale": self.timescale,
            "name": self.name,
        }
