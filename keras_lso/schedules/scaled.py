"""`Scaled`: the rates of a schedule, times a factor."""

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


@keras.saving.register_keras_serializable("keras_lso", name="Scaled")
class Scaled(LearningRateSchedule):
    """Multiplies the rates of a schedule by a factor.

    ```python
    rate = factor * schedule(step)
    ```

    `keras_lso.callbacks.LossScaleMonitor(on_stall="restore")` wraps a schedule in this
    class, to continue at a lower rate. The config, and thus a saved model, holds the
    factor.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`, or a float, the
            constant rate.
        factor: The factor, at least 0.
        name: Defaults to `"Scaled"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is negative, NaN or infinite.

    Example:

    >>> import keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.5, warmup_steps=2)
    >>> schedule = keras_lso.schedules.Scaled(warmup, 0.5)
    >>> [float(schedule(step)) for step in range(4)]
    [0.0, 0.125, 0.25, 0.25]
    """

    def __init__(
        self,
        schedule: LearningRateSchedule | float,
        factor: float,
        name: str = "Scaled",
    ) -> None:
        super().__init__()
        self.schedule: LearningRateSchedule | float = check.schedule_or_rate(
            "schedule", schedule
        )
        self.factor: float = check.rate("factor", factor)
        self.name: str = check.name(name, type(self))

    @property
    def _counts_micro_batches(self):
        return getattr(self.schedule, "_counts_micro_batches", True)

    def __call__(self, step: int | Tensor) -> Tensor:
        return rate_at(self.schedule, step) * self.factor

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule": serialize_member(self.schedule),
            "factor": self.factor,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        config = check_config(cls.__qualname__, config, ["schedule"])
        config["schedule"] = deserialize_member("schedule", config["schedule"])
        return cls(**config)
