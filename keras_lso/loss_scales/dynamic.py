"""`DynamicLossScale`: a loss scale that is as high as the gradients allow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import LARGEST_STEP
from keras_lso._core.fields import AboveOne, Count, Fraction, Length, Scale, registered
from keras_lso._keras_internals.variables import assign, read, storage_of
from keras_lso.loss_scales.loss_scale import LossScale, clip_counter


@registered("DynamicLossScale")
@dataclass(eq=False, repr=False)
class DynamicLossScale(LossScale):
    """A loss scale that is as high as the gradients allow.

    ```python
    if finite:
        good_steps += 1
        if good_steps == increment_period:
            scale, good_steps = min(scale * growth_factor, max_scale), 0
    else:
        scale, good_steps = max(scale * backoff_factor, min_scale), 0
    ```

    Args:
        initial_loss_scale: The scale of the first step. Defaults to `2**15`.
        increment_period: The finite steps before the scale grows. Defaults to `2000`.
        multiplier: Above 1, for growth and, inverted, for backoff. Defaults to `2.0`.
        growth_factor: Above 1. Defaults to `multiplier`.
        backoff_factor: Between 0 and 1. Defaults to `1 / multiplier`.
        min_scale: The lower bound of the scale. Defaults to `2**-14`.
        max_scale: The upper bound of the scale. Defaults to `2**24`.
        hysteresis: The number of overflows at which the scale first drops. It then
            drops at each overflow until it grows. Defaults to `1`.
        consecutive_hysteresis: Whether every finite step, not only growth, resets the
            count of overflows. Defaults to `False`.

    Example:

    >>> import keras_lso
    >>> policy = keras_lso.loss_scales.DynamicLossScale(1024, increment_period=2)
    >>> policy.build()
    >>> scales = []
    >>> for finite in [True, True, True, False]:
    ...     policy.step(finite)
    ...     scales.append(float(policy()))
    >>> scales
    [1024.0, 2048.0, 2048.0, 1024.0]

    Reference:

    - [Micikevicius et al., 2018](https://arxiv.org/abs/1710.03740)
    """

    initial_loss_scale: Scale = 2.0**15
    increment_period: Count = 2000
    multiplier: AboveOne = 2.0
    growth_factor: AboveOne | None = None
    backoff_factor: Fraction | None = None
    min_scale: Scale = LossScale.min_scale
    max_scale: Scale = LossScale.max_scale
    hysteresis: Length = 1
    consecutive_hysteresis: bool = False

    _omitted = ("min_scale", "max_scale", "hysteresis", "consecutive_hysteresis")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth_factor is None:
            self.growth_factor = self.multiplier
        if self.backoff_factor is None:
            self.backoff_factor = 1.0 / self.multiplier

    def build(self, add_variable: Callable[..., keras.Variable] | None = None) -> None:
        if self.built:
            return
        super().build(add_variable)
        if self.hysteresis > 1:
            self.overflows_left: keras.Variable = self.add_variable(
                "overflows_left", self.hysteresis, dtype="int"
            )

    def step(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> None:
        finite = backend.scalar(finite, "bool")
        scale, good_steps = storage_of([self.scale, self.step_counter])
        backend.move_scale(
            scale,
            good_steps,
            finite,
            None if self.hysteresis == 1 else self._spend_overflow(finite),
            self.growth_factor,
            self._backoff(),
            self._period(),
            (self.min_scale, self.max_scale),
        )

    def _passes_over(self, keeps: Tensor) -> bool:
        # A subclass may do more than count.
        if type(self) is not DynamicLossScale or self.hysteresis > 1:
            return False
        # The step will count one more.
        counted = read(self.step_counter)
        assign(self.step_counter, counted - backend.xp.cast(keeps, counted.dtype))
        return True

    def _period(self) -> Any:
        """Returns the number of finite steps after which the scale grows now."""
        # The counter is an int32 on most backends.
        return min(self.increment_period, LARGEST_STEP)

    def _backoff(self) -> Any:
        """Returns the factor by which an overflow multiplies the scale now."""
        return self.backoff_factor

    def _grows(self, finite: Tensor) -> Tensor:
        """Returns whether the scale grows in this step."""
        counted = read(self.step_counter) + 1
        return backend.xp.logical_and(finite, counted >= self._period())

    def _spend_overflow(self, finite: Tensor) -> Tensor:
        """Takes an overflow off the budget; returns whether the scale drops."""
        xp = backend.xp
        overflows = xp.logical_not(finite)
        left = read(self.overflows_left)
        left = left - xp.cast(overflows, left.dtype)
        left = xp.maximum(left, xp.zeros_like(left))
        refills = finite if self.consecutive_hysteresis else self._grows(finite)
        full = backend.scalar(self.hysteresis, left.dtype)
        drops = xp.logical_and(overflows, left <= 0)
        assign(self.overflows_left, xp.where(refills, full, left))
        return drops

    def restore(self) -> None:
        super().restore()
        clip_counter(self.step_counter, 0, self.increment_period - 1)
        if self.hysteresis > 1:
            clip_counter(self.overflows_left, 0, self.hysteresis)

    def get_config(self) -> dict[str, Any]:
        config, multiplier = super().get_config(), self.multiplier
        implied = {"growth_factor": multiplier, "backoff_factor": 1.0 / multiplier}
        return {k: v for k, v in config.items() if v != implied.get(k)}
