"""Configs of optimizers, including those of other libraries and older versions."""

from collections.abc import Callable

import keras

from keras_lso._core.checks import fits_float32, is_number
from keras_lso._core.config_dicts import misfit, read_object
from keras_lso._keras_internals.optimizers import public_config

# Arguments of Keras's optimizers that Keras does not check.
_NUMBERS = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "ema_momentum",
    "loss_scale_factor",
)

# What a config describes: an optimizer, or an object that contains such configs; the
# arguments of a `LossScaleOptimizer`; or a learning-rate schedule.
OPTIMIZER, LOSS_SCALE_OPTIMIZER, SCHEDULE = "optimizer", "arguments", "schedule"

_reader: Callable


def set_reader(read):
    """Sets the function that implements `modernise`, which knows other libraries."""
    global _reader
    _reader = read
    return read


def modernise(kind, config, custom_objects=None):
    """Returns a config in the form of this version, whichever program wrote it."""
    return _reader(kind, config, custom_objects)


def adopt(config, custom_objects=None):
    """Returns a copy of `config` in which our classes replace their predecessors."""
    return modernise(OPTIMIZER, public_config(config), custom_objects)


def read_optimizer(config, custom_objects=None, what="optimizer"):
    """Returns the optimizer that a config dict describes; errors call it `what`."""
    try:
        modern = adopt(config, custom_objects)
    except RecursionError as error:
        raise misfit(config, what, error) from error
    check_numbers(modern, what)
    # Keras knows its own classes by their bare names too.
    read = keras.optimizers.deserialize
    if modern.get("module") or modern.get("registered_name"):
        read = keras.saving.deserialize_keras_object
    optimizer = read_object(read, modern, what, custom_objects)
    if isinstance(optimizer, str):
        # Keras returns the name of a class that it does not know.
        raise ValueError(
            f"Unknown optimizer class '{optimizer}'. If it is your own class, "
            f"pass it in `custom_objects`. Received: {config!r}"
        )
    return optimizer


def check_numbers(config, what):
    """Raises an error for numbers with which Keras's optimizers would compute NaN."""
    # Keras itself checks few of them. Configs of a user's own classes are not checked.
    arguments = config.get("config")
    is_own = not str(config.get("module") or "keras").startswith("keras")
    if is_own or not isinstance(arguments, dict):
        return
    for key, value in arguments.items():
        is_known = is_number(value) or isinstance(value, bool | None)
        if key in _NUMBERS and not is_known:
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
