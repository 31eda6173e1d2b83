"""`JoinedSchedules`: schedules one after the other."""

from collections.abc import Sequence
from typing import Any, Self

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso._core.checks import check_config
from keras_lso.schedules import _check as check
from keras_lso.schedules._members import (
    deserialize_member,
    rate_at,
    serialize_member,
)
from keras_lso.schedules._steps import as_tensor


@keras.saving.register_keras_serializable("keras_lso", name="Sequential")
class JoinedSchedules(LearningRateSchedule):
    """Joins schedules: each starts at a boundary, where its own step is 0.

    ```python
    if step < boundaries[0]: rate = schedules[0](step)
    elif step < boundaries[1]: rate = schedules[1](step - boundaries[0])
    ...
    else: rate = schedules[-1](step - boundaries[-1])
    ```

    `optax.join_schedules` does the same. Configs call the class `Sequential`.

    Keras's own schedules are called unchanged, with the limitations listed in
    `keras_lso.schedules.LinearWarmup`.

    Args:
        schedules: Schedules, and numbers for constant rates.
        boundaries: Strictly increasing, one fewer than `schedules`. The first step (not
            epoch) of each schedule except the first schedule.
        name: Defaults to `"Sequential"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> import keras, keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.8, warmup_steps=4)
    >>> decay = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)
    >>> schedule = keras_lso.schedules.JoinedSchedules([warmup, decay, 0.05], [4, 7])
    >>> [f"{float(schedule(step)):.2f}" for step in range(9)]
    ['0.00', '0.20', '0.40', '0.60', '0.80', '0.40', '0.20', '0.05', '0.05']
    """

    def __init__(
        self,
        schedules: Sequence[LearningRateSchedule | float],
        boundaries: Sequence[int],
        name: str = "Sequential",
    ) -> None:
        super().__init__()
        self.schedules: list[LearningRateSchedule | float] = check.list_of(
            check.schedule_or_rate, "schedules", schedules, at_least=1
        )
        count = len(self.schedules)
        self.boundaries: list[int] = check.boundaries(
            boundaries, count - 1, f"one fewer than the {count} `schedules`"
        )
        self.name: str = check.name(name, type(self))

    def __call__(self, step: int | Tensor) -> Tensor:
        step = as_tensor(step)
        rate = rate_at(self.schedules[0], step)
        for start, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            rate = ops.where(step < start, rate, rate_at(schedule, step - start))
        return rate

    def get_config(self) -> dict[str, Any]:
        return {
            "schedules": [serialize_member(each) for each in self.schedules],
            "boundaries": list(self.boundaries),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        config = check_config(cls.__qualname__, config, ["schedules", "boundaries"])
        config["schedules"] = check.list_of(
            deserialize_member, "schedules", config["schedules"]
        )
        return cls(**config)


# Configs call the class `Sequential`. Python code does not, since Keras has a model of
# that name. Keras writes the registered name, and `__name__` as `class_name`.
JoinedSchedules.__name__ = "Sequential"
