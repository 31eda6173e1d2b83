"""Schedules made of others: warm-ups, sequences, and other counts or heights."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from keras import ops

from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import check_list
from keras_lso._core.fields import Length, Rate, Real, Step, registered
from keras_lso.schedules._schedule import (
    Member,
    Schedule,
    Steps,
    as_tensor,
    check_boundaries,
    elapsed,
    power_of_step,
    rate_at,
    straight_line,
)

_ClassT = TypeVar("_ClassT", bound=type)

_OLD_NAMES = {
    "after_warmup_lr_sched": "schedule_or_rate",
    "warmup_learning_rate": "initial_learning_rate",
}


def _takes_old_names(cls: _ClassT) -> _ClassT:
    """Lets a constructor take the Model Garden's names for its arguments."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def with_old_names(self: Any, *args: Any, **kwargs: Any) -> None:
        old_names = _OLD_NAMES.keys() & kwargs.keys()
        renamed = {_OLD_NAMES[old]: kwargs.pop(old) for old in old_names}
        # With both names Python raises the error for an argument that comes twice.
        init(self, *args, **kwargs, **renamed)

    cls.__init__ = with_old_names  # type: ignore[misc]
    return cls


@dataclass(eq=False)
class _Warmup(Schedule):
    """Base of the warm-ups: `_warmup_rate` for `warmup_steps`, then the schedule."""

    schedule_or_rate: Member
    warmup_steps: Step

    _members = ("schedule_or_rate", "after_warmup_lr_sched")

    def _warmup_rate(self, steps: Steps, final: Tensor) -> Tensor:
        """Returns the rate of a step of the warm-up, given the rate at its end."""
        raise NotImplementedError

    def __call__(self, step: int | Tensor) -> Tensor:
        step = as_tensor(step)
        steps = elapsed(step)
        final = rate_at(self.schedule_or_rate, self.warmup_steps)
        return ops.where(
            steps.is_before(self.warmup_steps),
            self._warmup_rate(steps, final),
            rate_at(self.schedule_or_rate, step),
        )


@_takes_old_names
@registered("LinearWarmup")
@dataclass(eq=False)
class LinearWarmup(_Warmup):
    """Raises the learning rate along a straight line, then follows a schedule.

    The line ends at the schedule's rate at `warmup_steps`, where the schedule takes
    over. If that should be the schedule's own step 0, write a
    `keras_lso.schedules.JoinedSchedules`. Some of Keras's own schedules are inexact
    when compiled; those of `keras_lso.compat.model_garden` are exact.

    Args:
        schedule_or_rate: A schedule, or a float, the constant rate after the warm-up.
            The Model Garden's name for it is `after_warmup_lr_sched`.
        warmup_steps: The steps (not epochs) of the warm-up, 0 or more.
        initial_learning_rate: The rate of step 0. Defaults to `0.0`. In the Model
            Garden: `warmup_learning_rate`.
        name: Defaults to `"LinearWarmup"`.

    Example:

    >>> import keras, keras_lso
    >>> halving = keras.optimizers.schedules.ExponentialDecay(1.6, 2, 0.5)
    >>> schedule = keras_lso.schedules.LinearWarmup(halving, warmup_steps=4)
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.000', '0.100', '0.200', '0.300', '0.400', '0.283', '0.200', '0.141', '0.100']

    Reference:

    - [Goyal et al., 2017](https://arxiv.org/abs/1706.02677)
    """

    initial_learning_rate: Rate = 0.0
    name: str = "LinearWarmup"

    def _warmup_rate(self, steps: Steps, final: Tensor) -> Tensor:
        start = self.initial_learning_rate
        return straight_line(steps, self.warmup_steps, start, final)


@_takes_old_names
@registered("PolynomialWarmup")
@dataclass(eq=False)
class PolynomialWarmup(_Warmup):
    """Raises the learning rate along a power of the step, then follows a schedule.

    ```python
    rate = schedule(warmup_steps) * (max(step, 1) / warmup_steps) ** power
    ```

    Args:
        schedule_or_rate: As in `keras_lso.schedules.LinearWarmup`.
        warmup_steps: The steps (not epochs) of the warm-up, 0 or more.
        power: The exponent. Defaults to `1.0`: a straight line.
        name: Defaults to `"PolynomialWarmup"`.

    Example:

    >>> from keras_lso.schedules import PolynomialWarmup
    >>> schedule = PolynomialWarmup(1.6, 4, power=2.0)
    >>> [f"{float(schedule(step)):.1f}" for step in range(6)]
    ['0.1', '0.1', '0.4', '0.9', '1.6', '1.6']
    """

    power: Real = 1.0
    name: str = "PolynomialWarmup"

    def _warmup_rate(self, steps: Steps, final: Tensor) -> Tensor:
        return final * power_of_step(steps, self.power, self.warmup_steps)


# Not called `Sequential` in Python, since Keras has a model of that name.
@registered("Sequential")
@dataclass(eq=False)
class JoinedSchedules(Schedule):
    """Joins schedules: each starts at a boundary, where its own step is 0.

    Configs call the class `Sequential`.

    Args:
        schedules: Schedules, and numbers for constant rates.
        boundaries: Strictly increasing: the first step (not epoch) of each schedule
            but the first.
        name: Defaults to `"Sequential"`.

    Example:

    >>> import keras, keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.8, warmup_steps=4)
    >>> decay = keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5)
    >>> schedule = keras_lso.schedules.JoinedSchedules([warmup, decay, 0.05], [4, 7])
    >>> [f"{float(schedule(step)):.2f}" for step in range(9)]
    ['0.00', '0.20', '0.40', '0.60', '0.80', '0.40', '0.20', '0.05', '0.05']
    """

    schedules: Sequence[Member]
    boundaries: Sequence[Step]
    name: str = "Sequential"

    _members = ("schedules",)

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(check_list("schedules", self.schedules, at_least=1))
        check_boundaries(self.boundaries, count - 1, "one fewer than `schedules`")

    def __call__(self, step: int | Tensor) -> Tensor:
        step = as_tensor(step)
        rate = rate_at(self.schedules[0], step)
        for start, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            rate = ops.where(step < start, rate, rate_at(schedule, step - start))
        return rate


@registered("PerUpdate")
@dataclass(eq=False)
class PerUpdate(Schedule):
    """Makes a schedule count updates instead of micro-batches.

    ```python
    rate = schedule(step // micro_batches)
    ```

    With `gradient_accumulation_steps`, Keras's optimizers count micro-batches.

    Args:
        schedule: A schedule whose steps are updates, or a float, the constant rate.
        micro_batches: Positive. The optimizer's `gradient_accumulation_steps`, or 1 if
            steps are micro-batches on purpose: `LossScaleOptimizer` then does not warn.
        name: Defaults to `"PerUpdate"`.

    Example:

    >>> import keras, keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.5, warmup_steps=2)
    >>> schedule = keras_lso.schedules.PerUpdate(warmup, micro_batches=4)
    >>> [float(schedule(step)) for step in range(10)]
    [0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    >>> optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=4)
    """

    schedule: Member
    micro_batches: Length
    name: str = "PerUpdate"

    _members = ("schedule",)
    # `LossScaleOptimizer` checks this before it warns.
    _counts_micro_batches = False

    def __call__(self, step: int | Tensor) -> Tensor:
        return rate_at(self.schedule, elapsed(step).whole // self.micro_batches)


@registered("Scaled")
@dataclass(eq=False)
class Scaled(Schedule):
    """Multiplies the rates of a schedule by a factor.

    `keras_lso.callbacks.LossScaleMonitor(on_stall="restore")` uses it.

    Args:
        schedule: A schedule, or a float, the constant rate.
        factor: The factor, at least 0.
        name: Defaults to `"Scaled"`.

    Example:

    >>> import keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.5, warmup_steps=2)
    >>> schedule = keras_lso.schedules.Scaled(warmup, 0.5)
    >>> [float(schedule(step)) for step in range(4)]
    [0.0, 0.125, 0.25, 0.25]
    """

    schedule: Member
    factor: Rate
    name: str = "Scaled"

    _members = ("schedule",)

    @property
    def _counts_micro_batches(self) -> bool:
        """Whether the schedule does: see `warn_of_micro_batches`."""
        return getattr(self.schedule, "_counts_micro_batches", True)

    def __call__(self, step: int | Tensor) -> Tensor:
        return rate_at(self.schedule, step) * self.factor
