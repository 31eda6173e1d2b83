"""Warm-ups in front of any schedule: the rate rises to the schedule's rate."""

import functools
from typing import Any, Self, cast

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import FunctionT, Tensor
from keras_lso._core.checks import check_config
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import power_of_step, straight_line
from keras_lso.schedules._members import (
    deserialize_member,
    rate_at,
    serialize_member,
)
from keras_lso.schedules._steps import as_tensor, elapsed, is_before

_OLD_NAMES = {
    "after_warmup_lr_sched": "schedule_or_rate",
    "warmup_learning_rate": "initial_learning_rate",
}


def _takes_old_names(init: FunctionT) -> FunctionT:
    """Lets a constructor take the Model Garden's names for its arguments."""

    @functools.wraps(init)
    def with_old_names(self, *args, **kwargs):
        for old, new in _OLD_NAMES.items():
            if old not in kwargs:
                continue
            if new in kwargs:
                raise TypeError(
                    f"`{old}` is the Model Garden's name for `{new}`. Give one of "
                    f"them. Received: {old}={kwargs[old]!r}, {new}={kwargs[new]!r}"
                )
            kwargs[new] = kwargs.pop(old)
        init(self, *args, **kwargs)

    return cast(FunctionT, with_old_names)


class _Warmup(LearningRateSchedule):
    """Base of the warm-ups: `_warmup_rate` for `warmup_steps`, then the schedule."""

    schedule_or_rate: Any
    warmup_steps: int

    def __call__(self, step: int | Tensor) -> Tensor:
        step = as_tensor(step)
        steps = elapsed(step)
        final_rate = rate_at(self.schedule_or_rate, self.warmup_steps)
        return ops.where(
            is_before(steps, self.warmup_steps),
            self._warmup_rate(steps, final_rate),
            rate_at(self.schedule_or_rate, step),
        )

    def _warmup_rate(self, step, final_rate):
        """Returns the rate at `Steps` of the warm-up, in float32."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        config = check_config(cls.__qualname__, config)
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

    The line ends at the schedule's rate at `warmup_steps`, so the rate does not jump.
    The schedule's own steps are not shifted: its first `warmup_steps` steps are
    skipped. If the decay should start after the warm-up, give it an offset,
    `PolynomialDecayWithOffset(offset=warmup_steps, ...)`, or join warm-up and decay
    with `keras_lso.schedules.JoinedSchedules`.

    Keras's own schedules are called unchanged. When compiled, Keras's `PolynomialDecay`
    may be NaN from its last step on if `power` is below 1, and miscounts its cycles;
    the stairs of Keras's `ExponentialDecay` may begin a step late. Use
    `keras_lso.schedules.PolynomialDecayWithOffset` or `ExponentialDecayWithOffset`
    instead: with an offset of 0 they are the same schedules, and exact.

    Args:
        schedule_or_rate: A `keras.optimizers.schedules.LearningRateSchedule`, or a
            float, the constant rate after the warm-up. The Model Garden's name for it,
            `after_warmup_lr_sched`, works too, but not both.
        warmup_steps: Zero or more. The number of steps (not epochs) of the warm-up.
            With 0 there is none.
        initial_learning_rate: The rate of step 0. The Model Garden's name for it,
            `warmup_learning_rate`, works too. Defaults to `0.0`.
        name: Defaults to `"LinearWarmup"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

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

    @_takes_old_names
    def __init__(
        self,
        schedule_or_rate: LearningRateSchedule | float,
        warmup_steps: int,
        initial_learning_rate: float = 0.0,
        name: str = "LinearWarmup",
    ) -> None:
        super().__init__()
        self.schedule_or_rate: LearningRateSchedule | float = check.schedule_or_rate(
            "schedule_or_rate", schedule_or_rate
        )
        self.warmup_steps: int = check.step("warmup_steps", warmup_steps)
        self.initial_learning_rate: float = check.rate(
            "initial_learning_rate", initial_learning_rate
        )
        self.name: str = check.name(name, type(self))

    def _warmup_rate(self, step, final_rate):
        return straight_line(
            step, self.warmup_steps, self.initial_learning_rate, final_rate
        )

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule_or_rate": serialize_member(self.schedule_or_rate),
            "warmup_steps": self.warmup_steps,
            "initial_learning_rate": self.initial_learning_rate,
            "name": self.name,
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

    Step 0 counts as step 1, so no rate is zero. The schedule's own steps are not
    shifted, and Keras's own schedules are called unchanged: see
    `keras_lso.schedules.LinearWarmup`. The Model Garden's spelling, `PolynomialWarmUp`,
    is the same class.

    Args:
        schedule_or_rate: A `keras.optimizers.schedules.LearningRateSchedule`, or a
            float, the constant rate after the warm-up. The Model Garden's name for it,
            `after_warmup_lr_sched`, works too, but not both.
        warmup_steps: Zero or more. The number of steps (not epochs) of the warm-up.
            With 0 there is none.
        power: The exponent. Defaults to `1.0`: a straight line.
        name: Defaults to `"PolynomialWarmup"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import PolynomialWarmup
    >>> schedule = PolynomialWarmup(1.6, 4, power=2.0)
    >>> [f"{float(schedule(step)):.1f}" for step in range(6)]
    ['0.1', '0.1', '0.4', '0.9', '1.6', '1.6']
    """

    @_takes_old_names
    def __init__(
        self,
        schedule_or_rate: LearningRateSchedule | float,
        warmup_steps: int,
        power: float = 1.0,
        name: str = "PolynomialWarmup",
    ) -> None:
        super().__init__()
        self.schedule_or_rate: LearningRateSchedule | float = check.schedule_or_rate(
            "schedule_or_rate", schedule_or_rate
        )
        self.warmup_steps: int = check.step("warmup_steps", warmup_steps)
        self.power: float = check.real("power", power)
        self.name: str = check.name(name, type(self))

    def _warmup_rate(self, step, final_rate):
        return final_rate * power_of_step(step, self.power, self.warmup_steps)

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule_or_rate": serialize_member(self.schedule_or_rate),
            "warmup_steps": self.warmup_steps,
            "power": self.power,
            "name": self.name,
        }
