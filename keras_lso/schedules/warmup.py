"""A rise of the learning rate in front of any schedule."""

import functools

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._checks import LARGEST_STEP, check_int, check_rate, check_real
from keras_lso._config_dicts import check_config
from keras_lso.schedules._members import (
    check_member,
    check_name,
    deserialize_member,
    elapsed,
    float32,
    rate_at,
    serialize_member,
    straight_line,
)

_OLD_NAMES = {
    "after_warmup_lr_sched": "schedule_or_rate",
    "warmup_learning_rate": "initial_learning_rate",
}


def _takes_old_names(init):
    """Lets a constructor take the Model Garden's names for its arguments."""

    @functools.wraps(init)
    def with_old_names(self, *args, **kwargs):
        for old, new in _OLD_NAMES.items():
            if old not in kwargs:
                continue
            if new in kwargs:
                raise TypeError(
                    f"`{old}` is the Model Garden's name for `{new}`: give one of "
                    f"them. Received: {old}={kwargs[old]!r}, {new}={kwargs[new]!r}"
                )
            kwargs[new] = kwargs.pop(old)
        return init(self, *args, **kwargs)

    return with_old_names


class _Warmup(LearningRateSchedule):
    """Base of the two: `warmup_rate` for some steps, then the schedule itself."""

    def __init__(self, schedule_or_rate, warmup_steps, name):
        self.schedule_or_rate = check_member("schedule_or_rate", schedule_or_rate)
        self.warmup_steps = check_int(
            "warmup_steps", warmup_steps, at_least=0, at_most=LARGEST_STEP
        )
        self.name = check_name(name, self)

    def __call__(self, step):
        step = ops.convert_to_tensor(step)
        final_rate = rate_at(self.schedule_or_rate, self.warmup_steps)
        return ops.where(
            step < self.warmup_steps,
            self.warmup_rate(elapsed(step), final_rate),
            rate_at(self.schedule_or_rate, step),
        )

    def warmup_rate(self, step, final_rate):
        """Returns the rate at a `step`, in float32, before the last one."""
        raise NotImplementedError

    def get_config(self):
        return {
            "schedule_or_rate": serialize_member(self.schedule_or_rate),
            "warmup_steps": self.warmup_steps,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config):
        config = check_config(cls.__name__, config)
        for key in ("schedule_or_rate", "after_warmup_lr_sched"):
            if key in config:
                config[key] = deserialize_member(key, config[key])
        return cls(**config)


@keras.saving.register_keras_serializable("keras_lso", name="LinearWarmup")
class LinearWarmup(_Warmup):
    """Raises the learning rate along a straight line, then follows a schedule.

    ```python
    if step < warmup_steps:
        final = schedule(warmup_steps)
        rate = initial + step / warmup_steps * (final - initial)
    else:
        rate = schedule(step)
    ```

    The line ends where the schedule is at `warmup_steps`, so the rate does not
    jump. The schedule's own clock is not shifted: its first `warmup_steps` steps
    are never seen. Give it an offset for a decay that starts when the warm-up ends:
    `PolynomialDecayWithOffset(offset=warmup_steps, ...)`, or join the two with
    `keras_lso.schedules.Sequential`.

    Args:
        schedule_or_rate: A `keras.optimizers.schedules.LearningRateSchedule`, or a
            float, the constant rate after the warm-up. The Model Garden's name for
            it, `after_warmup_lr_sched`, works too.
        warmup_steps: Int of zero or more. The number of steps (not epochs) of the
            warm-up. With 0 there is none.
        initial_learning_rate: Float. The rate of step 0. Defaults to `0.0`. The
            Model Garden's name for it, `warmup_learning_rate`, works too.
        name: String. Defaults to `"LinearWarmup"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If the schedule is none, or an argument is given by both names.
        ValueError: If a rate is negative, NaN or infinite, or `warmup_steps` is not
            an integer of zero or more.

    Example:

    >>> import keras, keras_lso
    >>> halving = keras.optimizers.schedules.ExponentialDecay(1.6, 2, 0.5)
    >>> schedule = keras_lso.schedules.LinearWarmup(halving, warmup_steps=4)
    >>> for step in range(9):
    ...     print(step, f"{float(schedule(step)):.3f}", f"{float(halving(step)):.3f}")
    0 0.000 1.600
    1 0.100 1.131
    2 0.200 0.800
    3 0.300 0.566
    4 0.400 0.400
    5 0.283 0.283
    6 0.200 0.200
    7 0.141 0.141
    8 0.100 0.100

    Reference:

    - [Goyal et al., 2017, Accurate, Large Minibatch SGD](
        https://arxiv.org/abs/1706.02677)
    """

    @_takes_old_names
    def __init__(
        self,
        schedule_or_rate,
        warmup_steps,
        initial_learning_rate=0.0,
        name="LinearWarmup",
    ):
        super().__init__(schedule_or_rate, warmup_steps, name)
        self.initial_learning_rate = check_rate(
            "initial_learning_rate", initial_learning_rate
        )

    def warmup_rate(self, step, final_rate):
        return straight_line(
            step, self.warmup_steps, self.initial_learning_rate, final_rate
        )

    def get_config(self):
        return {
            **super().get_config(),
            "initial_learning_rate": self.initial_learning_rate,
        }


@keras.saving.register_keras_serializable("keras_lso", name="PolynomialWarmup")
class PolynomialWarmup(_Warmup):
    """Raises the learning rate along a power of the step, then follows a schedule.

    ```python
    if step < warmup_steps:
        final = schedule(warmup_steps)
        rate = final * (max(step, 1) / warmup_steps) ** power
    else:
        rate = schedule(step)
    ```

    Step 0 counts as step 1, so no rate is zero. The schedule's own clock is not
    shifted, see `keras_lso.schedules.LinearWarmup`. The Model Garden's spelling,
    `PolynomialWarmUp`, is the same class.

    Args:
        schedule_or_rate: A `keras.optimizers.schedules.LearningRateSchedule`, or a
            float, the constant rate after the warm-up. The Model Garden's name for
            it, `after_warmup_lr_sched`, works too.
        warmup_steps: Int of zero or more. The number of steps (not epochs) of the
            warm-up. With 0 there is none.
        power: Float. The power of the step. Defaults to `1.0`: a straight line.
        name: String. Defaults to `"PolynomialWarmup"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If the schedule is none, or an argument is given by both names.
        ValueError: If the rate is negative, NaN or infinite, `power` is not finite,
            or `warmup_steps` is not an integer of zero or more.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.PolynomialWarmup(1.6, 4, power=2.0)
    >>> [f"{float(schedule(step)):.1f}" for step in range(6)]
    ['0.1', '0.1', '0.4', '0.9', '1.6', '1.6']
    """

    @_takes_old_names
    def __init__(
        self, schedule_or_rate, warmup_steps, power=1.0, name="PolynomialWarmup"
    ):
        super().__init__(schedule_or_rate, warmup_steps, name)
        self.power = check_real("power", power)

    def warmup_rate(self, step, final_rate):
        done = ops.maximum(step, float32(1)) / max(self.warmup_steps, 1)
        return final_rate * ops.power(done, float32(self.power))

    def get_config(self):
        return {**super().get_config(), "power": self.power}


PolynomialWarmUp = PolynomialWarmup
"""The Model Garden's spelling."""
