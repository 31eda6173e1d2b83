"""`get`, `serialize` and `deserialize` of loss-scale policies."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_lso._core.checks import is_number, refusal
from keras_lso._core.config_dicts import read_object
from keras_lso.loss_scales.dynamic import DynamicLossScale
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.loss_scale import LossScale


def get(
    identifier: LossScale | float | str | dict[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> LossScale:
    """Returns the loss-scale policy for `identifier`.

    Args:
        identifier: A number (a fixed scale), `"dynamic"`, a `LossScale` (returned
            unchanged), or the config dict of one.
        custom_objects: As in `deserialize`. Defaults to `None`.

    Returns:
        A `LossScale`.

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
    """Returns the config dict of a loss-scale policy, without its state.

    Args:
        policy: A `LossScale`.

    Returns:
        A dict that JSON can hold, for `deserialize`.

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

    Returns:
        A `LossScale`.

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
