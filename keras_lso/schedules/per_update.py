"""`PerUpdate`: a schedule that counts updates when gradients are accumulated."""

from typing import Any, Self

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso._core.checks import check_config
from keras_lso.schedules import _check as check
from keras_lso.schedules._members import (
    deserialize_member,
    rate_at,
    serialize_member,
)
from keras_lso.schedules._steps import elapsed


@keras.saving.register_keras_serializable("keras_lso", name="PerUpdate")
class PerUpdate(LearningRateSchedule):
    """Makes a schedule count updates instead of micro-batches.

    ```python
    rate = schedule(step // micro_batches)
    ```

    With `gradient_accumulation_steps`, Keras's optimizers call a schedule with the
    number of the micro-batch: a warm-up of 1000 steps is over after 250 updates of four
    micro-batches each. `PerUpdate` calls the schedule with the number of the update, so
    all micro-batches of a window have the rate of their update. A micro-batch that
    `keras_lso.LossScaleOptimizer` drops does not count, and its window ends later.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule` whose steps are
            updates, or a float, the constant rate.
        micro_batches: Positive. The number of micro-batches in an update: the
            optimizer's `gradient_accumulation_steps`. Pass 1 if the steps of `schedule`
            are micro-batches on purpose: `LossScaleOptimizer` then does not warn.
        name: Defaults to `"PerUpdate"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> import keras, keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.5, warmup_steps=2)
    >>> schedule = keras_lso.schedules.PerUpdate(warmup, micro_batches=4)
    >>> [float(schedule(step)) for step in range(10)]
    [0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    >>> optimizer = keras_lso.LossScaleOptimizer(
    ...     keras.optimizers.SGD(schedule, gradient_accumulation_steps=4)
    ... )
    """

    # `LossScaleOptimizer` checks this before it warns.
    _counts_micro_batches = False

    def __init__(
        self,
        schedule: LearningRateSchedule | float,
        micro_batches: int,
        name: str = "PerUpdate",
    ) -> None:
        super().__init__()
        self.schedule: LearningRateSchedule | float = check.schedule_or_rate(
            "schedule", schedule
        )
        self.micro_batches: int = check.length("micro_batches", micro_batches)
        self.name: str = check.name(name, type(self))

    def __call__(self, step: int | Tensor) -> Tensor:
        return rate_at(self.schedule, elapsed(step).whole // self.micro_batches)

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule": serialize_member(self.schedule),
            "micro_batches": self.micro_batches,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        config = check_config(cls.__qualname__, config, ["schedule"])
        config["schedule"] = deserialize_member("schedule", config["schedule"])
        return cls(**config)
