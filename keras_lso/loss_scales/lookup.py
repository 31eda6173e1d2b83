"""Loss-scale policies from what describes them, and back."""

from collections.abc import Mapping
from typing import Any, Literal

import keras

from keras_lso._core.checks import (
    check_bounds,
    check_positive_int,
    check_scale,
    is_number,
    refusal,
)
from keras_lso._core.configs import read_object
from keras_lso.loss_scales.dynamic import DynamicLossScale
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.loss_scale import LossScale
from keras_lso.loss_scales.searching import SearchingLossScale


def get(
    identifier: LossScale | float | str | dict[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> LossScale:
    """Returns the loss-scale policy for `identifier`.

    Args:
        identifier: A number (a fixed scale), `"dynamic"`, a `LossScale` (returned
            unchanged), or the config dict of one.
        custom_objects: As in `deserialize`. Defaults to `None`.

    Raises:
        TypeError: If `identifier` has another type.
        ValueError: If the number, the name or the config is not valid.

    Example:

    >>> import keras_lso
    >>> keras_lso.loss_scales.get(128)
    FixedLossScale(loss_scale_value=128.0)
    """
    if isinstance(identifier, LossScale):
        return identifier
    if isinstance(identifier, dict):
        return deserialize(identifier, custom_objects)
    requirement = "be a number, 'dynamic', a `LossScale` or the config dict of one"
    if isinstance(identifier, str):
        if identifier == "dynamic":
            return DynamicLossScale()
        if identifier == "auto":
            requirement += ". To search a scale write `initial_scale='auto'`"
        raise refusal("identifier", identifier, requirement)
    if is_number(identifier):
        return FixedLossScale(identifier)
    raise refusal("identifier", identifier, requirement, TypeError)


def get_for(
    argument: str, value: LossScale | float | str | dict[str, Any]
) -> LossScale:
    """Returns `get(value)`, with errors that name the argument of a constructor."""
    try:
        return get(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        message = f"Argument `{argument}` describes no loss scale: {error}"
        raise kind(message) from error


def serialize(policy: LossScale) -> dict[str, Any]:
    """Returns a config dict for `deserialize` and JSON, without the state.

    Args:
        policy: A `LossScale`.

    Raises:
        TypeError: If `policy` is not a `LossScale`.

    Example:

    >>> import keras_lso
    >>> config = keras_lso.loss_scales.serialize(keras_lso.loss_scales.get(128))
    >>> config["registered_name"], config["config"]
    ('keras_lso>FixedLossScale', {'loss_scale_value': 128.0})
    """
    if not isinstance(policy, LossScale):
        requirement = "be a `LossScale`. `keras_lso.loss_scales.get` makes one"
        raise refusal("policy", policy, requirement, TypeError)
    return keras.saving.serialize_keras_object(policy)


def deserialize(
    config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> LossScale:
    """Returns the loss-scale policy that a config dict describes.

    Args:
        config: The return value of `serialize`, or a config that TF1 wrote.
        custom_objects: The classes that the config refers to, by their names. Defaults
            to `None`.

    Raises:
        TypeError: If `config` is not a dict, or Keras finds no class for it.
        ValueError: If `config` describes no loss scale, or does not fit its class.

    Example:

    >>> import keras_lso
    >>> config = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 128}}
    >>> keras_lso.loss_scales.deserialize(config)
    FixedLossScale(loss_scale_value=128.0)
    """
    if not isinstance(config, dict):
        requirement = "be a dict, as `serialize` returns it"
        raise refusal("config", config, requirement, TypeError)
    # TF1 wrote the bare class name.
    for cls in (FixedLossScale, DynamicLossScale):
        if config == {"class_name": cls.__name__, "config": config.get("config")}:
            return cls.from_config(config["config"])
    read = keras.saving.deserialize_keras_object
    policy = read_object(read, config, "loss-scale policy", custom_objects)
    if not isinstance(policy, LossScale):
        requirement = f"describe a `LossScale`, not a {type(policy).__name__}"
        raise refusal("config", config, requirement)
    return policy


# --- The arguments of `LossScaleOptimizer` ---------------------------------------


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


def policy_arguments(policy: LossScale) -> dict[str, Any]:
    """Returns the arguments that describe `policy`, apart from Keras's own two."""
    if type(policy) is FixedLossScale:
        return {"dynamic": False}
    if type(policy) is DynamicLossScale and policy.multiplier == 2.0:
        # Keras's own are `initial_scale` and `dynamic_growth_steps`.
        plain = {"initial_loss_scale", "increment_period", "multiplier"}
        others = {k: v for k, v in policy.get_config().items() if k not in plain}
        if others.keys() <= {"min_scale", "max_scale"}:
            return others
    return {"loss_scale": keras.saving.serialize_keras_object(policy)}
