"""The loss-scale policy that the arguments of `LossScaleOptimizer` describe."""

from typing import Any, Literal

import keras

from keras_lso._core.checks import check_bounds, check_positive_int, check_scale
from keras_lso.loss_scales.dynamic import (
    DEFAULT_GROWTH_STEPS,
    DEFAULT_INITIAL_SCALE,
    DynamicLossScale,
)
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.lookup import get_for
from keras_lso.loss_scales.loss_scale import (
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    LossScale,
)
from keras_lso.loss_scales.searching import SearchingLossScale


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
        raise TypeError(
            "Argument `dynamic` must be True or False. Received: "
            f"dynamic={dynamic!r}. To start at a scale, write "
            "`LossScaleOptimizer(inner_optimizer, initial_scale=...)`; to fix it, add "
            "`dynamic=False`."
        )
    min_scale = check_scale("min_scale", min_scale)
    max_scale = check_scale("max_scale", max_scale)
    moves = {
        "dynamic_growth_steps": dynamic_growth_steps,
        "min_scale": None if min_scale == DEFAULT_MIN_SCALE else min_scale,
        "max_scale": None if max_scale == DEFAULT_MAX_SCALE else max_scale,
    }
    if loss_scale is not None:
        others = {
            "dynamic=False": None if dynamic else False,
            "initial_scale": initial_scale,
            **moves,
        }
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(
                "`loss_scale` is a whole loss-scale policy and cannot be combined "
                f"with {', '.join(given)}. Set them in its constructor instead, for "
                "example `loss_scale=keras_lso.loss_scales.DynamicLossScale(...)`. "
                f"Received: loss_scale={loss_scale!r}"
            )
        return get_for("loss_scale", loss_scale)
    if not dynamic:
        return _fixed_policy(initial_scale, moves)
    return _dynamic_policy(initial_scale, dynamic_growth_steps, min_scale, max_scale)


def _dynamic_policy(initial_scale, dynamic_growth_steps, min_scale, max_scale):
    policy: type[DynamicLossScale] = DynamicLossScale
    if isinstance(initial_scale, str) and initial_scale == "auto":
        policy = SearchingLossScale
        initial_scale = min(max(DEFAULT_INITIAL_SCALE, min_scale), max_scale)
    elif initial_scale is None:
        initial_scale = DEFAULT_INITIAL_SCALE
    if dynamic_growth_steps is None:
        dynamic_growth_steps = DEFAULT_GROWTH_STEPS
    # Checked here too, so that an error has the names of the user's arguments.
    initial_scale = check_scale("initial_scale", initial_scale)
    check_bounds(min_scale, max_scale, initial_scale=initial_scale)
    check_positive_int("dynamic_growth_steps", dynamic_growth_steps)
    return policy(
        initial_scale,
        dynamic_growth_steps,
        min_scale=min_scale,
        max_scale=max_scale,
    )


def _fixed_policy(initial_scale, moves):
    if initial_scale is None:
        raise ValueError(
            "With `dynamic=False`, `initial_scale` must be given: it is the fixed "
            "scale. Received: initial_scale=None. Write for example "
            "`LossScaleOptimizer(inner_optimizer, dynamic=False, initial_scale=1024)`. "
            "(Keras's own class has no fixed scale and would say: set "
            "`loss_scale_factor` on the inner optimizer.)"
        )
    for argument, value in moves.items():
        if value is not None:
            raise ValueError(
                f"With `dynamic=False` the scale never moves, so `{argument}` must "
                f"not be given. Received: {argument}={value!r}"
            )
    check_scale("initial_scale", initial_scale)
    return FixedLossScale(initial_scale)


def policy_arguments(policy: LossScale) -> dict[str, Any]:
    """Returns the arguments that describe `policy`, apart from Keras's own two."""
    # Keras's own are `initial_scale` and `dynamic_growth_steps`.
    if type(policy) is FixedLossScale:
        return {"dynamic": False}
    plain = {
        "initial_loss_scale": policy.initial_loss_scale,
        "increment_period": getattr(policy, "increment_period", None),
        "multiplier": 2.0,
    }
    config = policy.get_config()
    bounds: dict[str, Any] = {
        k: config.pop(k) for k in ("min_scale", "max_scale") if k in config
    }
    if type(policy) is DynamicLossScale and config == plain:
        return bounds
    return {"loss_scale": keras.saving.serialize_keras_object(policy)}
