"""Config dicts of other libraries and older versions, read as ours."""

import inspect

import keras
import numpy as np

from keras_lso._checks import check_config, is_scale
from keras_lso._core.configs import (
    LOSS_SCALE_OPTIMIZER,
    OPTIMIZER,
    OURS,
    SCHEDULE,
    register_reader,
)
from keras_lso._option_checks import check_rate, check_real
from keras_lso.loss_scales import DEFAULT_MAX_SCALE, DEFAULT_MIN_SCALE

_LARS = {
    "module": "keras_lso.lars",
    "class_name": "LARS",
    "registered_name": "keras_lso>LARS",
}
# What tf.keras called its class, over time.
_LOSS_SCALE_OPTIMIZERS = {
    "lossscaleoptimizer",
    "lossscaleoptimizerv1",
    "lossscaleoptimizerv3",
}
_BUILTIN = {
    name.lower(): name
    for name, cls in vars(keras.optimizers).items()
    if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
}


@register_reader(OPTIMIZER)
def adopt_classes(config, custom_objects=None):
    """Returns a config in which the classes that we succeed are ours.

    These are the `LossScaleOptimizer` of Keras and of tf.keras, and the Model Garden's
    `LARS`, unless the caller has a class of that name in `custom_objects`. Other
    optimizers of tf.keras become those of Keras 3.
    """
    return _adopt(config, custom_objects or {})


def _adopt(config, custom_objects):
    if isinstance(config, list | tuple):
        return type(config)(_adopt(item, custom_objects) for item in config)
    if not isinstance(config, dict):
        return config
    config = {key: _adopt(value, custom_objects) for key, value in config.items()}
    if not isinstance(config.get("config"), dict):
        return config
    # TensorFlow 2.11 to 2.15 put this before the names of its own optimizers.
    name = str(config.get("class_name")).removeprefix("Custom>")
    if keras.saving.get_registered_object(name, custom_objects) is not None:
        return config
    package = str(config.get("module") or "").split(".")[0]
    if name.lower() in _LOSS_SCALE_OPTIMIZERS and package in ("", "keras", "tf_keras"):
        config.update(OURS)
    # Keras has no LARS; the Model Garden's package is called official.
    elif name == "LARS" and package in ("", "official"):
        config.update(_LARS)
    elif name.lower() in _BUILTIN and _is_tf_keras(config, package):
        config = _to_keras_3(config, _BUILTIN[name.lower()], custom_objects)
    return config


# --- The inner optimizers of tf.keras -----------------------------------------


def _is_tf_keras(config, package):
    """Whether tf.keras, and not Keras 3, has written this config of an optimizer."""
    if package not in ("", "keras", "tf_keras"):
        return False
    arguments = config["config"]
    has_marks = {"lr", "decay", "jit_compile", "is_legacy_optimizer"} & set(arguments)
    rate = arguments.get("learning_rate")
    has_old_schedule = (
        isinstance(rate, dict) and (rate.get("config") or {}).get("name", "") is None
    )
    is_old = "legacy" in str(config.get("module")) or package == "tf_keras"
    is_old |= str(config.get("class_name")).startswith("Custom>")
    return bool(has_marks or has_old_schedule or is_old)


def _to_keras_3(config, class_name, custom_objects):
    # tf.keras leaves NumPy's scalars in configs that it has not written as JSON.
    arguments = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in config["config"].items()
    }
    # Both are about how tf.keras computed a step, not about what it computed.
    arguments.pop("jit_compile", None)
    arguments.pop("is_legacy_optimizer", None)
    rate = arguments.pop("lr", None)
    rate = arguments.pop("learning_rate", rate)
    decay = arguments.pop("decay", None)
    if rate is not None and not isinstance(rate, dict):
        rate = check_real("learning_rate", rate)
    elif isinstance(rate, dict):
        rate = read_schedule_config(rate, custom_objects)
    # Nadam called something else so: how fast its momentum changes.
    if decay and class_name != "Nadam":
        rate = _decaying(class_name, rate, check_rate("decay", decay))
    if rate is not None:
        arguments["learning_rate"] = rate
    return {
        "module": "keras.optimizers",
        "class_name": class_name,
        "config": arguments,
        "registered_name": None,
    }


def _decaying(class_name, rate, decay):
    """Returns the config of the schedule that tf.keras's `decay` stands for."""
    if rate is None:
        signature = inspect.signature(getattr(keras.optimizers, class_name).__init__)
        rate = signature.parameters["learning_rate"].default
    if not isinstance(rate, float):
        raise ValueError(
            "Keras 3 has no optimizer with both a schedule and a `decay`. Write the "
            "schedule so that it decays further. Received: "
            f"learning_rate={rate!r}, decay={decay!r}"
        )
    return {
        "module": "keras.optimizers.schedules",
        "class_name": "InverseTimeDecay",
        "config": {
            "initial_learning_rate": rate,
            "decay_steps": 1,
            "decay_rate": decay,
        },
        "registered_name": None,
    }


@register_reader(SCHEDULE)
def read_schedule_config(config, custom_objects=None):
    """Returns a schedule's config as Keras 3 reads it, whoever wrote it."""
    arguments = check_config("`learning_rate`", config.get("config") or {})
    if arguments.get("name", "") is None:
        # The default of tf.keras, which Keras 3 refuses.
        del arguments["name"]
    config = {**config, "config": arguments}
    name = str(config.get("class_name"))
    is_builtin = hasattr(keras.optimizers.schedules, name)
    if is_builtin and "module" not in config and name not in (custom_objects or {}):
        config |= {"module": "keras.optimizers.schedules", "registered_name": None}
    return config


# --- The loss-scale optimizer of tf.keras -------------------------------------


@register_reader(LOSS_SCALE_OPTIMIZER)
def modern_arguments(config, custom_objects=None):
    """Returns the arguments of a `LossScaleOptimizer` as today's class takes them.

    Args:
        config: Dict, what `get_config` returned. TensorFlow 2.0 to 2.3 wrote
            `optimizer` and `loss_scale`, later versions what Keras 3 writes and
            `dynamic` besides.
        custom_objects: Not needed. Defaults to `None`.

    Returns:
        A new dict.
    """
    config = check_config("LossScaleOptimizer", config)
    if "optimizer" in config and "inner_optimizer" not in config:
        config["inner_optimizer"] = config.pop("optimizer")
        if config.get("loss_scale") is None:
            raise ValueError(
                "The config of a LossScaleOptimizer that names its inner optimizer "
                "'optimizer', as TensorFlow 2.0 to 2.3 did, must hold a 'loss_scale'. "
                f"Received: {config!r}"
            )
    loss_scale = config.get("loss_scale")
    if isinstance(loss_scale, dict) and loss_scale.get("class_name") == (
        "DynamicLossScale"
    ):
        arguments = _within_bounds(loss_scale.get("config"), "initial_loss_scale")
        config["loss_scale"] = {**loss_scale, "config": arguments}
    elif loss_scale is None and config.get("dynamic", True):
        config = _within_bounds(config, "initial_scale")
    return config


def _within_bounds(config, initial):
    """Widens the bounds, of which others have none, by an initial scale outside."""
    config = check_config("LossScale", {} if config is None else config)
    scale = config.get(initial)
    # What is no scale is refused later, by its name.
    if is_scale(scale) and scale > DEFAULT_MAX_SCALE:
        config.setdefault("max_scale", float(scale))
    if is_scale(scale) and scale < DEFAULT_MIN_SCALE:
        config.setdefault("min_scale", float(scale))
    return config
