"""`JoinedSchedules`: schedules one after the other.

The module keeps its name, which saved configs hold, although the class was renamed.
"""

from keras import ops

from keras_lso._core.checks import check_config
from keras_lso.schedules import _check as check
from keras_lso.schedules._declared import Schedule, declared, field
from keras_lso.schedules._members import deserialize_member, rate_at
from keras_lso.schedules._renamed import renamed
from keras_lso.schedules._steps import as_tensor

__getattr__ = renamed(__name__, Sequential="JoinedSchedules")


@declared("Sequential")
class JoinedSchedules(Schedule):
    """Joins schedules: each starts at a boundary, where its own step is 0.

    ```python
    if step < boundaries[0]: rate = schedules[0](step)
    elif step < boundaries[1]: rate = schedules[1](step - boundaries[0])
    ...
    else: rate = schedules[-1](step - boundaries[-1])
    ```

    `optax.join_schedules` does the same. Configs hold the class's former name,
    `Sequential`.

    {{decays_of_keras}}

    Args:
        schedules: List of `keras.optimizers.schedules.LearningRateSchedule`s and
            floats, the constant rates.
        boundaries: List of ints, strictly increasing, one fewer than `schedules`.
            The first step (not epoch) of each schedule but the first one.
        {{others}}

    Example:

    >>> import keras, keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.8, warmup_steps=4)
    >>> decay = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)
    >>> schedule = keras_lso.schedules.JoinedSchedules([warmup, decay, 0.05], [4, 7])
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
        step = as_tensor(step)
        rate = rate_at(self.schedules[0], step)
        for start, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            rate = ops.where(step < start, rate, rate_at(schedule, step - start))
        return rate

    @classmethod
    def from_config(cls, config):
        config = check_config(cls.__qualname__, config, ["schedules", "boundaries"])
        read_all = check.list_of(deserialize_member)
        config["schedules"] = read_all("schedules", config["schedules"])
        return cls(**config)
