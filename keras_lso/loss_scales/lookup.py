"""`get`: from a number, a name or a config to a policy."""

import keras

from keras_lso._checks import is_number
from keras_lso._config_dicts import read_object
from keras_lso.loss_scales.dynamic import DynamicLossScale
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.loss_scale import LossScale


def get(identifier, custom_objects=None):
    """Returns the policy that `identifier` stands for.

    Args:
        identifier: A number (a fixed scale), `"dynamic"`, a `LossScale` (which
            is returned as it is), or the config dict of one.
        custom_objects: Dict of names to classes that the config may refer to.
            Defaults to `None`.

    Returns:
        A `LossScale`.

    Raises:
        TypeError: If `identifier` is none of these.
        ValueError: If the number, the name or the config is not a valid one.

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
        return _from_config_dict(identifier, custom_objects)
    if is_number(identifier):
        return FixedLossScale(identifier)
    raise TypeError(
        "A loss scale must be a number, 'dynamic', a "
        "`keras_lso.loss_scales.LossScale` or the config dict of one. "
        f"Received: {identifier!r} of type {type(identifier).__name__}"
    )


def _from_config_dict(config, custom_objects):
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
