"""Schedules one after the other."""

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._checks import check_boundaries, check_list
from keras_lso._config_dicts import check_config
from keras_lso.schedules._members import (
    check_member,
    check_name,
    deserialize_member,
    rate_at,
    serialize_member,
)


@keras.saving.register_keras_serializable("keras_lso", name="Sequential")
class Sequential(LearningRateSchedule):
    """Joins schedules: each takes over at a boundary, and its own clock starts there.

    ```python
    if step < boundaries[0]: rate = schedules[0](step)
    elif step < boundaries[1]: rate = schedules[1](step - boundaries[0])
    ...
    else: rate = schedules[-1](step - boundaries[-1])
    ```

    This is what `optax.join_schedules` does.

    Args:
        schedules: List of `keras.optimizers.schedules.LearningRateSchedule`s and
            floats, the constant rates.
        boundaries: List of ints, strictly increasing, one fewer than `schedules`.
            The first step (not epoch) of each schedule but the first one.
        name: String. Defaults to `"Sequential"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If a member is neither a schedule nor a number.
        ValueError: If there is no schedule, a rate is negative, NaN or infinite, or
            the boundaries do not increase or do not fit the schedules.

    Example:

    >>> import keras, keras_lso
    >>> schedule = keras_lso.schedules.Sequential(
    ...     [
    ...         keras_lso.schedules.LinearWarmup(0.8, warmup_steps=4),
    ...         keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5),
    ...         0.05,
    ...     ],
    ...     boundaries=[4, 7],
    ... )
    >>> for step in range(9):
    ...     print(step, f"{float(schedule(step)):.2f}")
    0 0.00
    1 0.20
    2 0.40
    3 0.60
    4 0.80
    5 0.40
    6 0.20
    7 0.05
    8 0.05
    """

    def __init__(self, schedules, boundaries, name="Sequential"):
        schedules = check_list("schedules", schedules, at_least=1)
        self.schedules = [
            check_member(f"schedules[{i}]", schedule)
            for i, schedule in enumerate(schedules)
        ]
        self.boundaries = check_boundaries(
            boundaries,
            len(schedules) - 1,
            f"one fewer than the {len(schedules)} `schedules`",
        )
        self.name = check_name(name, self)

    def __call__(self, step):
        step = ops.convert_to_tensor(step)
        rate = rate_at(self.schedules[0], step)
        for start, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            rate = ops.where(step < start, rate, rate_at(schedule, step - start))
        return rate

    def get_config(self):
        return {
            "schedules": [serialize_member(schedule) for schedule in self.schedules],
            "boundaries": self.boundaries,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config):
        config = check_config("Sequential", config, ["schedules", "boundaries"])
        schedules = [
            deserialize_member(f"schedules[{i}]", schedule)
            for i, schedule in enumerate(check_list("schedules", config["schedules"]))
        ]
        return cls(**{**config, "schedules": schedules})
