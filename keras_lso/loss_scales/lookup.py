"""Loss-scale policies from what describes them, and back."""

from collections.abc import Mapping
from typing import Any, Literal

import keras

from keras_lso._core.checks import (
    check_bounds,
    check_config,
    check_positive_int,
    check_scale,
    is_number,
    refusal,
)
from keras_lso._core.configs import older_configs, read_inner_optimizer
from keras_lso._core.lookup import Lookup
from keras_lso._keras_internals.state import config_of
from keras_lso.loss_scales.dynamic import DynamicLossScale
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.loss_scale import LossScale
from keras_lso.loss_scales.searching import SearchingLossScale

_LOOKUP = Lookup(LossScale, "a `LossScale`", "loss-scale policy")


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
    if isinstance(identifier, type) and issubclass(identifier, LossScale):
        requirement += f", not a class: write `{identifier.__name__}(...)`"
    raise refusal("identifier", identifier, requirement, TypeError)


def get_for(
    argument: str, value: LossScale | float | str | dict[str, Any]
) -> LossScale:
    """Returns `get(value)`, with errors that name the argument of a constructor."""
    try:
        return get(value)
    except (TypeError, ValueError) as error:
        cls = TypeError if isinstance(error, TypeError) else ValueError
        message = f"Argument `{argument}` describes no loss scale: {error}"
        raise cls(message) from error


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
    return _LOOKUP.write("policy", policy, "`keras_lso.loss_scales.get` makes one")


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
    _LOOKUP.check(config)
    # TF1 wrote the bare class name.
    for cls in (FixedLossScale, DynamicLossScale):
        if config == {"class_name": cls.__name__, "config": config.get("config")}:
            return cls.from_config(config["config"])
    return _LOOKUP.find(config, custom_objects)


# --- Arguments and configs of a `LossScaleOptimizer` ----------------------------------


def policy_of(
    dynamic: bool,
    initial_scale: float | Literal["auto"] | None,
    dynamic_growth_steps: int | None,
    loss_scale: LossScale | float | str | dict[str, Any] | None,
    min_scale: float | None,
    max_scale: float | None,
) -> LossScale:
    """Returns the loss-scale policy that the constructor's arguments describe."""
    if not isinstance(dynamic, bool):
        requirement = (
            "be True or False. To start at a scale, write `initial_scale=...`; to fix "
            "it, add `dynamic=False`; for a loss-scale policy write `loss_scale=...`"
        )
        if isinstance(dynamic, str):
            requirement = (
                "be True or False. The scale is dynamic without it: leave it out"
            )
        raise refusal("dynamic", dynamic, requirement, TypeError)
    moves = {
        "dynamic_growth_steps": dynamic_growth_steps,
        "min_scale": min_scale,
        "max_scale": max_scale,
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


def _given(arguments: dict[str, Any]) -> str:
    """Returns the arguments that are not None, as in a call."""
    return ", ".join(f"{k}={v!r}" for k, v in arguments.items() if v is not None)


def _dynamic_policy(
    initial_scale: float | Literal["auto"] | None,
    growth_steps: int | None,
    min_scale: float | None,
    max_scale: float | None,
) -> LossScale:
    """Returns a dynamic loss-scale policy; None stands for the default."""
    policy: type[DynamicLossScale] = DynamicLossScale
    min_scale = policy.min_scale if min_scale is None else min_scale
    max_scale = policy.max_scale if max_scale is None else max_scale
    min_scale = check_scale("min_scale", min_scale)
    max_scale = check_scale("max_scale", max_scale)
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


def read_config(
    config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> tuple[keras.optimizers.Optimizer, dict[str, Any]]:
    """Returns the inner optimizer of a wrapper's config, and its other arguments."""
    config = check_config("LossScaleOptimizer", config)
    config = older_configs().modern_arguments(config)
    inner = read_inner_optimizer("LossScaleOptimizer", config, custom_objects)
    config.pop("protect_statistics", None)  # No argument: see `from_config`.
    if config.get("loss_scale") is not None:
        # These two are written for readers that know only Keras's four keys.
        config.pop("initial_scale", None)
        config.pop("dynamic_growth_steps", None)
        config["loss_scale"] = get(config["loss_scale"], custom_objects)
    return inner, config


def write_config(optimizer: Any) -> dict[str, Any]:
    """Returns the config of a `LossScaleOptimizer`, for `read_config`."""
    config = {
        "name": optimizer.name,
        "inner_optimizer": config_of(optimizer.inner_optimizer),
        "initial_scale": optimizer.initial_scale,
        "dynamic_growth_steps": optimizer.dynamic_growth_steps,
        **_arguments_of(optimizer.loss_scale_policy),
    }
    if optimizer.master_weights != "auto":
        config["master_weights"] = optimizer.master_weights
    if optimizer.spike_guard is not None:
        guard = keras.saving.serialize_keras_object(optimizer.spike_guard)
        config["spike_guard"] = guard
    if optimizer.slot_dtype is not None:
        config["slot_dtype"] = optimizer.slot_dtype
    if optimizer.shard_state:
        config["shard_state"] = True
    if optimizer._protects:
        config["protect_statistics"] = True
    return config


def _arguments_of(policy: LossScale) -> dict[str, Any]:
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
