"""Warm-ups in front of any schedule: the rate rises to that of the schedule.

They are apart from the decays that have a warm-up of their own.
"""

import functools
from typing import Any

from keras import ops

from keras_lso._core.checks import check_config
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import power_of_step, straight_line
from keras_lso.schedules._declared import Schedule, declared, field
from keras_lso.schedules._members import deserialize_member, rate_at
from keras_lso.schedules._steps import as_tensor, elapsed, is_before

_OLD_NAMES = {
    "after_warmup_lr_sched": "schedule_or_rate",
    "warmup_learning_rate": "initial_learning_rate",
}


def _takes_old_names(cls):
    """Lets a class take the Model Garden's names for its arguments."""
    init = cls.__init__

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
        init(self, *args, **kwargs)

    cls.__init__ = with_old_names
    return cls


class _Warmup(Schedule):
    """Base of the warm-ups: `warmup_rate` for `warmup_steps`, then the schedule."""

    schedule_or_rate: Any
    warmup_steps: int
    name: str

    def __call__(self, step):
        step = as_tensor(step)
        steps = elapsed(step)
        final_rate = rate_at(self.schedule_or_rate, self.warmup_steps)
        return ops.where(
            is_before(steps, self.warmup_steps),
            self.warmup_rate(steps, final_rate),
            rate_at(self.schedule_or_rate, step),
        )

    def warmup_rate(self, step, final_rate):
        """Returns the rate at `Steps` of the warm-up, in float32."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config):
        config = check_config(cls.__qualname__, config)
        for key in ("schedule_or_rate", "after_warmup_lr_sched"):
            if key in config:
                config[key] = deserialize_member(key, config[key])
        return cls(**config)


@_takes_old_names
@declared("LinearWarmup")
class LinearWarmup(_Warmup):
    """Raises the learning rate along a straight line, then follows a schedule.

    ```python
    if step < warmup_steps:
        final = schedule(warmup_steps)
        rate = initial + step / warmup_steps * (final - initial)
    else:
        rate = schedule(step)
    ```

    The line ends at the schedule's rate at `warmup_steps`, so the rate does not jump.
    The schedule's own steps are not shifted: the first `warmup_steps` of them are left
    out. For a decay that starts after the warm-up give it an offset,
    `PolynomialDecayWithOffset(offset=warmup_steps, ...)`, or join the two with
    `keras_lso.schedules.JoinedSchedules`.

    {{decays_of_keras}}

    Args:
        initial_learning_rate: Float. The rate of step 0. The Model Garden's name for
            it, `warmup_learning_rate`, works too.
        {{others}}

    Example:

    >>> import keras, keras_lso
    >>> halving = keras.optimizers.schedules.ExponentialDecay(1.6, 2, 0.5)
    >>> schedule = keras_lso.schedules.LinearWarmup(halving, warmup_steps=4)
    >>> [f"{float(halving(step)):.3f}" for step in range(9)]
    ['1.600', '1.131', '0.800', '0.566', '0.400', '0.283', '0.200', '0.141', '0.100']
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.000', '0.100', '0.200', '0.300', '0.400', '0.283', '0.200', '0.141', '0.100']

    Reference:

    - [Goyal et al., 2017, Accurate, Large Minibatch SGD](
        https://arxiv.org/abs/1706.02677)
    """

    schedule_or_rate: Any = field(check.schedule_or_rate)
    warmup_steps: int = field(check.step)
    initial_learning_rate: float = field(check.rate, default=0.0)
    name: str = field(check.name, default="LinearWarmup")

    def warmup_rate(self, step, final_rate):
        return straight_line(
            step, self.warmup_steps, self.initial_learning_rate, final_rate
        )


@_takes_old_names
@declared("PolynomialWarmup")
class PolynomialWarmup(_Warmup):
    """Raises the learning rate along a power of the step, then follows a schedule.

    ```python
    if step < warmup_steps:
        final = schedule(warmup_steps)
        rate = final * (max(step, 1) / warmup_steps) ** power
    else:
        rate = schedule(step)
    ```

    Step 0 counts as step 1, so no rate is zero. The schedule's own steps are not
    shifted, see `keras_lso.schedules.LinearWarmup`. The Model Garden's spelling,
    `PolynomialWarmUp`, is the same class.

    {{decays_of_keras}}

    Args:
        power: Float. The power of the step. Defaults to `1.0`: a straight line.
        {{others}}

    Example:

    >>> from keras_lso.schedules import PolynomialWarmup
    >>> schedule = PolynomialWarmup(1.6, 4, power=2.0)
    >>> [f"{float(schedule(step)):.1f}" for step in range(6)]
    ['0.1', '0.1', '0.4', '0.9', '1.6', '1.6']
    """

    schedule_or_rate: Any = field(check.schedule_or_rate)
    warmup_steps: int = field(check.step)
    power: float = field(check.real, default=1.0)
    name: str = field(check.name, default="PolynomialWarmup")

    def warmup_rate(self, step, final_rate):
        return final_rate * power_of_step(step, self.power, self.warmup_steps)


PolynomialWarmUp = PolynomialWarmup
"""The Model Garden's spelling."""
