"""`get`, `serialize` and `deserialize` of loss-scale policies."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_lso._core.checks import is_number
from keras_lso._core.configs import read_object
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
            unchanged), or the config dict of a `LossScale`.
        custom_objects: Dict of names to classes that the config may refer to.
            Defaults to `None`.

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
    if isinstance(identifier, str):
        if identifier != "dynamic":
            raise ValueError(
                "The only loss-scale policy with a name is 'dynamic'. "
                f"Received: {identifier!r}"
            )
        return DynamicLossScale()
    if isinstance(identifier, dict):
        return deserialize(identifier, custom_objects)
    if is_number(identifier):
        return FixedLossScale(identifier)
    raise TypeError(
        "A loss scale must be a number, 'dynamic', a "
        "`keras_lso.loss_scales.LossScale` or the config dict of one. "
        f"Received: {identifier!r} of type {type(identifier).__name__}"
    )


def get_for(
    argument: str, value: LossScale | float | str | dict[str, Any]
) -> LossScale:
    """Returns `get(value)`, with errors that name the argument of a constructor."""
    try:
        return get(value)
    except TypeError as error:
        raise TypeError(
            f"Argument `{argument}` describes no loss scale: {error}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"Argument `{argument}` describes no loss scale: {error}"
        ) from error


def serialize(policy: LossScale) -> dict[str, Any]:
    """Returns the config of a loss-scale policy, for `deserialize`, as a dict.

    The config holds the arguments. The state, such as the current scale of a
    `DynamicLossScale`, is saved with the optimizer.

    Args:
        policy: A `LossScale`.

    Returns:
        A dict that JSON can hold, with the address of the class, and the arguments as
        `config`.

    Raises:
        TypeError: If `policy` is not a `LossScale`.

    Example:

    >>> import keras_lso
    >>> config = keras_lso.loss_scales.serialize(keras_lso.loss_scales.get(128))
    >>> config["registered_name"], config["config"]
    ('keras_lso>FixedLossScale', {'loss_scale_value': 128.0})
    """
    if not isinstance(policy, LossScale):
        raise TypeError(
            "Argument `policy` must be a `keras_lso.loss_scales.LossScale`; "
            "`keras_lso.loss_scales.get` makes one from a number or 'dynamic'. "
            f"Received: policy={policy!r} of type {type(policy).__name__}"
        )
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
        ValueError: If `config` describes no loss scale, or does not fit the class
            that it names.

    Example:

    >>> import keras_lso
    >>> policy = keras_lso.loss_scales.LogMaxLossScale(beta1=0.5)
    >>> config = keras_lso.loss_scales.serialize(policy)
    >>> keras_lso.loss_scales.deserialize(config).get_config() == policy.get_config()
    True
    """
    if not isinstance(config, dict):
        raise TypeError(
            "Argument `config` must be a dict, as `keras_lso.loss_scales.serialize` "
            f"returns it. Received: config={config!r} of type {type(config).__name__}"
        )
    name = config.get("class_name")
    if not isinstance(name, str) or "config" not in config:
        raise ValueError(
            "The config dict of a loss-scale policy has the keys 'class_name' and "
            f"'config'. Received: {config!r}"
        )
    # TF1 wrote the bare class name.
    builtin = {cls.__name__: cls for cls in (FixedLossScale, DynamicLossScale)}
    if name in builtin and set(config) == {"class_name", "config"}:
        return builtin[name].from_config(config["config"])
    policy = read_object(
        keras.saving.deserialize_keras_object,
        config,
        "loss-scale policy",
        custom_objects,
    )
    if not isinstance(policy, LossScale):
        raise ValueError(
            "The config dict must describe a `keras_lso.loss_scales.LossScale`. "
            f"Received one of {type(policy).__name__}: {config!r}"
        )
    return policy
