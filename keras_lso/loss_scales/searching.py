"""`SearchingLossScale`: a dynamic loss scale that finds its height in a few steps."""

import math
from collections.abc import Callable
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import refusal
from keras_lso._core.fields import AboveOne, Count, Scale, registered
from keras_lso._keras_internals.variables import assign, read
from keras_lso.loss_scales.dynamic import DynamicLossScale
from keras_lso.loss_scales.loss_scale import clip_counter, float32

# Before the first finite step: without an overflow yet, and after one.
_STARTS, _FALLS = -1, -2


@registered("SearchingLossScale")
class SearchingLossScale(DynamicLossScale):
    """A dynamic loss scale that finds its height in a few steps.

    The scale falls by `search_factor` until a step is finite. To recover from
    overshooting, it then grows every `search_period` steps until it overflows, or until
    one more growth would reach the last scale that overflowed. From then on, or if the
    first step is finite, it is a `DynamicLossScale`.

    `LossScaleOptimizer(inner_optimizer, initial_scale="auto")` uses this class.

    Args:
        initial_loss_scale: The scale of the first step. Defaults to `2**15`.
        increment_period: The finite steps before growth. Defaults to `2000`.
        multiplier: Above 1, for growth and, inverted, for backoff. Defaults to `2.0`.
        search_factor: At least `multiplier`. The divisor of the scale at an overflow
            before the first finite step. Defaults to `16.0`.
        search_period: The finite steps before growth in the search. Defaults to `20`.
        min_scale: The lower bound of the scale. Defaults to `2**-14`.
        max_scale: The upper bound of the scale. Defaults to `2**24`.

    Example:

    >>> from keras_lso.loss_scales.searching import SearchingLossScale
    >>> policy = SearchingLossScale(search_period=2)
    >>> policy.build()
    >>> scales = []
    >>> for finite in [False, False, True, True, True, False]:
    ...     policy.step(finite)
    ...     scales.append(float(policy()))
    >>> scales
    [2048.0, 128.0, 128.0, 256.0, 256.0, 128.0]
    """

    search_factor: float
    search_period: int

    def __init__(
        self,
        initial_loss_scale: Scale = DynamicLossScale.initial_loss_scale,
        increment_period: Count = DynamicLossScale.increment_period,
        multiplier: AboveOne = DynamicLossScale.multiplier,
        search_factor: AboveOne = 16.0,
        search_period: Count = 20,
        min_scale: Scale = DynamicLossScale.min_scale,
        max_scale: Scale = DynamicLossScale.max_scale,
    ) -> None:
        self.search_factor, self.search_period = search_factor, search_period
        super().__init__(
            initial_loss_scale,
            increment_period,
            multiplier,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        if self.search_factor < self.multiplier:
            requirement = f"be at least `multiplier`, {multiplier}"
            raise refusal("search_factor", search_factor, requirement)

    @property
    def _climbs(self) -> int:
        """The number of growths back to the scale that overflowed, less one."""
        # For powers, the quotient of the logarithms is a whole number up to rounding.
        steps = math.log(self.search_factor) / math.log(self.multiplier)
        return math.ceil(steps - 1e-9) - 1

    def build(self, add_variable: Callable[..., keras.Variable] | None = None) -> None:
        if self.built:
            return
        super().build(add_variable)
        # The number of growths left in the search, or the phase of the search.
        self.search_state: keras.Variable = self.add_variable(
            "search_state", _STARTS, dtype="int"
        )

    def step(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> None:
        xp = backend.xp
        finite = backend.scalar(finite, "bool")
        state, grows = read(self.search_state), self._grows(finite)
        super().step(finite, amax)

        climbs, zero, falls = (
            backend.scalar(number, state.dtype) for number in (self._climbs, 0, _FALLS)
        )
        started = xp.where(state == _FALLS, climbs, zero)
        searched = xp.where(finite, started, falls)
        left = state - xp.cast(grows, state.dtype)
        climbed = xp.where(finite, xp.maximum(left, zero), zero)
        assign(self.search_state, xp.where(state < 0, searched, climbed))

    def _period(self) -> Any:
        period = super()._period()
        state = read(self.search_state)
        searching = backend.scalar(min(self.search_period, period), state.dtype)
        period = backend.scalar(period, state.dtype)
        return backend.xp.where(state > 0, searching, period)

    def _backoff(self) -> Any:
        falls = read(self.search_state) < 0
        divisor, factor = self.search_factor, super()._backoff()
        return backend.xp.where(falls, float32(1.0 / divisor), float32(factor))

    def restore(self) -> None:
        super().restore()
        clip_counter(self.search_state, _FALLS, self._climbs)
