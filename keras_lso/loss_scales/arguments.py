"""The arguments of a `LossScaleOptimizer` that describe its loss scale."""

from typing import Any, Literal

from keras_lso._core.checks import (
    check_bounds,
    check_positive_int,
    check_scale,
    refusal,
)
from keras_lso.loss_scales.dynamic import DynamicLossScale
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.loss_scale import LossScale


def make_policy(
    dynamic: bool,
    initial_scale: float | Literal["auto"] | None,
    dynamic_growth_steps: int | None,
    loss_scale: LossScale | float | str | dict[str, Any] | None,
    min_scale: float,
    max_scale: float,
) -> LossScale:
    """Returns the loss-scale policy that the constructor's arguments describe."""
    if not isinstance(dynamic, bool):
        requirement = (
            "be True or False. To start at a scale, write `initial_scale=...`; to fix "
            "it, add `dynamic=False`; for a loss-scale policy write `loss_scale=...`"
        )
        raise refusal("dynamic", dynamic, requirement, TypeError)
    min_scale = check_scale("min_scale", min_scale)
    max_scale = check_scale("max_scale", max_scale)
    moves = {
        "dynamic_growth_steps": dynamic_growth_steps,
        "min_scale": None if min_scale == LossScale.min_scale else min_scale,
        "max_scale": None if max_scale == LossScale.max_scale else max_scale,
    }
    if loss_scale is not None:
        start = {"dynamic": None if dynamic else False, "initial_scale": initial_scale}
        if given := _given(start | moves):
            raise ValueError(
                "`loss_scale` is a whole loss-scale policy. Set the other arguments in "
                "its constructor, for example `loss_scale=keras_lso.loss_scales."
                f"DynamicLossScale(...)`. Received: loss_scale={loss_scale!r}, {given}"
            )
        if isinstance(loss_scale, LossScale):
            return loss_scale
        from keras_lso.loss_scales.lookup import get_for

        return get_for("loss_scale", loss_scale)
    if not dynamic:
        if given := _given(moves):
            raise ValueError(
                "With `dynamic=False` the scale never moves: leave out its growth and "
                f"its bounds. Received: {given}"
            )
        if initial_scale is None:
            raise ValueError(
                "With `dynamic=False`, `initial_scale` must be given, for example "
                "`initial_scale=1024`: it is the fixed scale. (Keras's own class has "
                "none, and says: set `loss_scale_factor` on the inner optimizer.) "
                "Received: initial_scale=None"
            )
        return FixedLossScale(check_scale("initial_scale", initial_scale))
    return _dynamic_policy(initial_scale, dynamic_growth_steps, min_scale, max_scale)


def _given(arguments):
    """Returns the arguments that are not None, as in a call."""
    return ", ".join(f"{k}={v!r}" for k, v in arguments.items() if v is not None)


def _dynamic_policy(initial_scale, growth_steps, min_scale, max_scale):
    policy: type[DynamicLossScale] = DynamicLossScale
    if isinstance(initial_scale, str) and initial_scale == "auto":
        from keras_lso.loss_scales.searching import SearchingLossScale

        policy = SearchingLossScale
        initial_scale = min(max(policy.initial_loss_scale, min_scale), max_scale)
    elif initial_scale is None:
        initial_scale = policy.initial_loss_scale
    if growth_steps is None:
        growth_steps = policy.increment_period
    # Checked here too, so that an error has the names of the user's arguments.
    initial_scale = check_scale("initial_scale", initial_scale)
    check_bounds(min_scale, max_scale, initial_scale=initial_scale)
    check_positive_int("dynamic_growth_steps", growth_steps)
    return policy(initial_scale, growth_steps, min_scale=min_scale, max_scale=max_scale)
