"""Schedules one after the other.

The module keeps its name, which saved configs hold, although the class has another.
"""

from keras import ops

from keras_lso._checks import check_config
from keras_lso.schedules import _check as check
from keras_lso.schedules._declared import Schedule, declared, field
from keras_lso.schedules._members import deserialize_member, rate_at
from keras_lso.schedules._renamed import renamed

__getattr__ = renamed(__name__, Sequential="JoinedSchedules")


@declared("Sequential")
class JoinedSchedules(Schedule):
    """Joins schedules: each takes over at a boundary, and its own clock starts there.

    ```python
    if step < boundaries[0]: rate = schedules[0](step)
    elif step < boundaries[1]: rate = schedules[1](step - boundaries[0])
    ...
    else: rate = schedules[-1](step - boundaries[-1])
    ```

    This is what `optax.join_schedules` does. The class was named `Sequential`, and
    configs still call it so.

    Args:
        schedules: List of `keras.optimizers.schedules.LearningRateSchedule`s and
            floats, the constant rates.
        boundaries: List of ints, strictly increasing, one fewer than `schedules`.
            The first step (not epoch) of each schedule but the first one.
        {{name}}

    {{returns_and_raises}}

    Example:

    >>> import keras, keras_lso
    >>> schedule = keras_lso.schedules.JoinedSchedules(
    ...     [
    ...         keras_lso.schedules.LinearWarmup(0.8, warmup_steps=4),
    ...         keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5),
    ...         0.05,
    ...     ],
    ...     boundaries=[4, 7],
    ... )
    >>> [f"{float(schedule(step)):.2f}" for step in range(9)]
    ['0.00', '0.20', '0.40', '0.60', '0.80', '0.40', '0.20', '0.05', '0.05']
    """

    schedules: list = field(check.list_of(check.schedule_or_rate, at_least=1))
    boundaries: list = field(check.any_list)
    name: str = field(check.name, default="Sequential")

    def _validate(self):
        count = len(self.schedules)
        reason = f"one fewer than the {count} `schedules`"
        self.boundaries = check.boundaries(self.boundaries, count - 1, reason)

    def __call__(self, step):
        step = ops.convert_to_tensor(step)
        rate = rate_at(self.schedules[0], step)
        for start, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            rate = ops.where(step < start, rate, rate_at(schedule, step - start))
        return rate

    @classmethod
    def from_config(cls, config):
        config = check_config(cls.__qualname__, config, ["schedules", "boundaries"])
        schedules = [
            deserialize_member(f"schedules[{i}]", schedule)
            for i, schedule in enumerate(
                check.any_list("schedules", config["schedules"])
            )
        ]
        return cls(**{**config, "schedules": schedules})
