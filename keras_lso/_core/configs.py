"""Configs of optimizers, including those of other libraries and older versions.

`compat/tf_keras/configs.py` reads these. It is imported when the first config is read,
and registers functions that convert a config to the form of this version.
"""

import importlib

import keras

from keras_lso._core.checks import fits_float32, is_number
from keras_lso._core.config_dicts import misfit, read_object
from keras_lso._keras_internals.optimizers import public_config

# The names of our class in a config.
OURS = {
    "module": "keras_lso.loss_scale_optimizer",
    "class_name": "LossScaleOptimizer",
    "registered_name": "keras_lso>LossScaleOptimizer",
}

# Arguments of Keras's optimizers that Keras does not check.
_NUMBERS = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "ema_momentum",
    "loss_scale_factor",
)

OPTIMIZER, LOSS_SCALE_OPTIMIZER, SCHEDULE = "optimizer", "arguments", "schedule"
_readers: dict = {OPTIMIZER: [], LOSS_SCALE_OPTIMIZER: [], SCHEDULE: []}


def register_reader(kind):
    """Returns a decorator that registers a reader of configs.

    Args:
        kind: `OPTIMIZER`, for whole configs of optimizers and objects that contain
            such configs; `LOSS_SCALE_OPTIMIZER`, for the arguments in the config of a
            `LossScaleOptimizer`; `SCHEDULE`, for the config of a learning-rate
            schedule.
    """

    def register(read):
        _readers[kind].append(read)
        return read

    return register


def modernise(kind, config, custom_objects=None):
    """Returns a config in the form of this version, whichever program wrote it.

    Args:
        kind: See `register_reader`.
        config: Dict.
        custom_objects: Dict of names to classes that the config refers to. Defaults to
            `None`.
    """
    importlib.import_module("keras_lso.compat.tf_keras.configs")
    for read in _readers[kind]:
        config = read(config, custom_objects)
    return config


def adopt(config, custom_objects=None):
    """Returns a copy of `config` in which our classes replace their predecessors.

    Args:
        config: The config of an optimizer or a model: a dict, or a list that contains
            dicts.
        custom_objects: Dict of names to classes, which are not replaced. Defaults to
            `None`.
    """
    return modernise(OPTIMIZER, public_config(config), custom_objects)


def read_optimizer(config, custom_objects=None, what="optimizer"):
    """Returns the optimizer that a config dict describes.

    Args:
        config: Dict, the return value of `keras.optimizers.serialize`.
        custom_objects: Dict of names to classes that the config refers to. Defaults to
            `None`.
        what: String that names the object in errors.

    Returns:
        A Keras optimizer.
    """
    try:
        modern = adopt(config, custom_objects)
    except RecursionError as error:
        raise misfit(config, what, error) from error
    check_numbers(modern, what)
    # Keras knows its own classes by their bare names too.
    has_address = modern.get("module") or modern.get("registered_name")
    read = (
        keras.saving.deserialize_keras_object
        if has_address
        else keras.optimizers.deserialize
    )
    optimizer = read_object(read, modern, what, custom_objects)
    if isinstance(optimizer, str):
        # Keras returns the name of a class that it does not know.
        raise ValueError(
            f"Unknown optimizer class '{optimizer}'. If it is your own class, "
            f"pass it in `custom_objects`. Received: {config!r}"
        )
    return optimizer


def check_numbers(config, what):
    """Raises an error for numbers with which Keras's optimizers would compute NaN.

    Keras itself checks few of them. Configs of a user's own classes are not checked.

    Args:
        config: Dict with a `class_name` and a `config`.
        what: String that names the object in errors.
    """
    arguments = config.get("config")
    is_own = not str(config.get("module") or "keras").startswith("keras")
    if is_own or not isinstance(arguments, dict):
        return
    for key, value in arguments.items():
        if key in _NUMBERS and not (
            value is None or isinstance(value, bool) or is_number(value)
        ):
            raise TypeError(
                f"The config of the {what} must hold a number or None as its '{key}'. "
                f"Received: {key}={value!r} of type {type(value).__name__}"
            )
        # An infinite `clipvalue` clips nothing.
        is_endless = key == "clipvalue" and value == float("inf")
        if is_number(value) and not fits_float32(value) and not is_endless:
            raise ValueError(
                f"The config of the {what} must hold numbers that are finite in "
                f"float32. Received: {key}={value!r}"
            )
        if isinstance(value, dict) and "class_name" in value:
            check_numbers(value, f"{key} of the {what}")
