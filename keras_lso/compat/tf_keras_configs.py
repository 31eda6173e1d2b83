"""Converts the config dicts of tf.keras 2, the Model Garden and Keras to ours."""

import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_lso._core.checks import check_config, check_rate, check_real, is_scale
from keras_lso.loss_scales import LossScale

# Our successors to the Model Garden's optimizers, by the names in its configs. The
# Model Garden and TensorFlow Addons register LAMB under the same name.
_SUCCEEDED = {"LARS": "LARS", "LAMB": "LAMB", "Addons>LAMB": "LAMB"}
_MODEL_GARDEN_PACKAGES = ("", "official", "tensorflow_addons")
_KERAS_PACKAGES = ("", "keras", "tf_keras")
# Arguments that no optimizer of Keras 3 has.
_OLD_ARGUMENTS = {"lr", "decay", "jit_compile", "is_legacy_optimizer"}
# The names of tf.keras's class in its various versions.
_LOSS_SCALE_OPTIMIZER = re.compile("LossScaleOptimizer(V[13])?", re.IGNORECASE)
_BUILTIN = {
    name.lower(): name
    for name, cls in vars(keras.optimizers).items()
    if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
}


def address_of(name: str) -> dict[str, str]:
    """Returns what a config says of one of our classes, apart from its arguments."""
    registered = f"keras_lso>{name}"
    return {"module": "keras_lso", "class_name": name, "registered_name": registered}


def adopt_classes(config: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    """Returns a config in which our classes replace their predecessors."""
    if isinstance(config, list | tuple):
        return type(config)(adopt_classes(item, custom_objects) for item in config)
    if not isinstance(config, dict):
        return config
    config = {key: adopt_classes(v, custom_objects) for key, v in config.items()}
    if not isinstance(config.get("config"), dict):
        return config
    # TensorFlow 2.11 to 2.15 prefixed the names of its own optimizers with this.
    name = str(config.get("class_name")).removeprefix("Custom>")
    if keras.saving.get_registered_object(name, custom_objects) is not None:
        return config
    package = str(config.get("module") or "").split(".")[0]
    if _LOSS_SCALE_OPTIMIZER.fullmatch(name) and package in _KERAS_PACKAGES:
        config |= address_of("LossScaleOptimizer")
    # Keras has neither name. The Model Garden's package is `official`.
    elif name in _SUCCEEDED and package in _MODEL_GARDEN_PACKAGES:
        config |= address_of(_SUCCEEDED[name])
    elif name.lower() in _BUILTIN and _is_tf_keras(config, package):
        config = _to_keras_3(config, _BUILTIN[name.lower()], custom_objects)
    return config


def _is_tf_keras(config: dict[str, Any], package: str) -> bool:
    """Whether tf.keras, and not Keras 3, wrote this config of an optimizer."""
    rate = config["config"].get("learning_rate")
    schedule = (rate.get("config") or {}) if isinstance(rate, dict) else {}
    return package in _KERAS_PACKAGES and (
        package == "tf_keras"
        or "legacy" in str(config.get("module"))
        or str(config.get("class_name")).startswith("Custom>")
        or not _OLD_ARGUMENTS.isdisjoint(config["config"])
        # The schedules of Keras 3 have a name.
        or schedule.get("name", "") is None
    )


def _to_keras_3(
    config: dict[str, Any], class_name: str, custom_objects: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Converts the config of an optimizer of tf.keras to one of Keras 3."""
    # A config that tf.keras has not written as JSON may hold NumPy's scalars.
    arguments = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in config["config"].items()
        # Neither changes the result of a step.
        if key not in ("jit_compile", "is_legacy_optimizer")
    }
    rate = arguments.pop("learning_rate", arguments.pop("lr", None))
    decay = arguments.pop("decay", None)
    if isinstance(rate, dict):
        rate = read_schedule_config(rate, custom_objects)
    elif rate is not None:
        rate = check_real("learning_rate", rate)
    # Nadam's `decay` is the decay of its momentum.
    if decay and class_name != "Nadam":
        rate = _decaying(rate, check_rate("decay", decay))
    if rate is not None:
        arguments["learning_rate"] = rate
    address = {"module": "keras.optimizers", "registered_name": None}
    return {"class_name": class_name, "config": arguments, **address}


def _decaying(rate: Any, decay: float) -> dict[str, Any]:
    """Returns the config of the schedule that is equivalent to tf.keras's `decay`."""
    if not isinstance(rate, float):
        raise ValueError(
            "Keras 3 has no optimizer with both a schedule and a `decay`, so the "
            "learning rate must be a number. Write the schedule so that it decays "
            f"further. Received: learning_rate={rate!r}, decay={decay!r}"
        )
    schedule = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)
    return keras.saving.serialize_keras_object(schedule)


def read_schedule_config(config: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    """Converts the config of a schedule of tf.keras or Keras 3 to one of Keras 3."""
    arguments = check_config("`learning_rate`", config.get("config") or {})
    if arguments.get("name", "") is None:
        # Keras 3 rejects this default of tf.keras.
        del arguments["name"]
    config = {**config, "config": arguments}
    name = str(config.get("class_name"))
    is_builtin = hasattr(keras.optimizers.schedules, name)
    if is_builtin and "module" not in config and name not in (custom_objects or {}):
        config |= {"module": "keras.optimizers.schedules", "registered_name": None}
    return config


def modern_arguments(config: Any) -> dict[str, Any]:
    """Converts an older config to arguments of the current `LossScaleOptimizer`."""
    config = check_config("LossScaleOptimizer", config)
    if "optimizer" in config and "inner_optimizer" not in config:
        config["inner_optimizer"] = config.pop("optimizer")
        if config.get("loss_scale") is None:
            raise ValueError(
                "A config with the key 'optimizer', as in TensorFlow 2.0 to 2.3, must "
                f"hold a 'loss_scale'. Received: {config!r}"
            )
    loss_scale = config.get("loss_scale")
    is_dict = isinstance(loss_scale, dict)
    if is_dict and loss_scale.get("class_name") == "DynamicLossScale":
        arguments = _within_bounds(loss_scale.get("config"), "initial_loss_scale")
        config["loss_scale"] = {**loss_scale, "config": arguments}
    elif loss_scale is None and config.get("dynamic", True):
        config = _within_bounds(config, "initial_scale")
    return config


def _within_bounds(config: Any, initial: str) -> dict[str, Any]:
    """Widens our bounds to include the initial scale; other classes have no bounds."""
    config = check_config("LossScale", {} if config is None else config)
    scale = config.get(initial)
    # The constructor rejects a value that is no scale, and names the argument.
    if is_scale(scale) and not LossScale.min_scale <= scale <= LossScale.max_scale:
        config.setdefault("max_scale" if scale > 1 else "min_scale", float(scale))
    return config
