"""Configs, including those of other libraries and older versions, and damaged ones.

Keras decides which classes a config may name: its own, registered classes and
`custom_objects`. No module is imported for a config, except Keras's own.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import keras

from keras_lso._core.checks import fits_float32, is_number
from keras_lso._keras_internals.rules import GIVEN_NUMBERS
from keras_lso._keras_internals.state import public_config

# Arguments of Keras's optimizers that Keras does not check.
_NUMBERS = (*GIVEN_NUMBERS, "ema_momentum", "loss_scale_factor")


# The classes that a config refers to, by their names.
CustomObjects: TypeAlias = Mapping[str, Any] | None


def older_configs() -> ModuleType:
    """Returns the module that converts the configs of other libraries."""
    # The only import of `compat` from below, which runs when a config is read.
    from keras_lso.compat import tf_keras_configs

    return tf_keras_configs


def adopt(config: Any, custom_objects: CustomObjects = None) -> Any:
    """Returns a copy of `config` in which our classes replace their predecessors."""
    return older_configs().adopt_classes(public_config(config), custom_objects)


def read_optimizer(
    config: dict[str, Any],
    custom_objects: CustomObjects = None,
    what: str = "optimizer",
) -> keras.Optimizer:
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


def read_inner_optimizer(
    owner: str, config: dict[str, Any], custom_objects: CustomObjects = None
) -> keras.Optimizer:
    """Takes the inner optimizer out of the config of an `owner`, and returns it."""
    inner = config.pop("inner_optimizer", None)
    if not isinstance(inner, dict):
        raise ValueError(
            f"The config of a {owner} must hold the config dict of its inner optimizer "
            f"as 'inner_optimizer'. Received: inner_optimizer={inner!r}"
        )
    return read_optimizer(inner, custom_objects, "`inner_optimizer`")


def check_numbers(config: dict[str, Any], what: str) -> None:
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


# Errors, apart from ValueError and TypeError, of a config that fits no class.
_MISFITS = (AttributeError, LookupError, OverflowError, RecursionError)
# The keys of a config, with the types of their values.
_ADDRESS = (
    ("class_name", str, "the name of a class"),
    ("module", str | None, "a string, or None,"),
    ("registered_name", str | None, "a string, or None,"),
    ("config", dict | None, "a dict of arguments"),
)


def read_object(
    read: Callable[..., Any],
    config: dict[str, Any],
    what: str,
    custom_objects: CustomObjects = None,
) -> Any:
    """Returns `read(config, custom_objects)`; raises a `ValueError` if that fails."""
    # `read` is a function of Keras's that deserializes; errors call the object `what`.
    _check_address(config, what)
    try:
        return read(config, custom_objects=custom_objects)
    except _MISFITS as error:
        raise misfit(config, what, error) from error


def misfit(config: dict[str, Any], what: str, error: Exception) -> ValueError:
    """Returns the error for a config that does not fit the class it names."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply, or contains itself"
    return ValueError(
        f"The config of the {what} does not fit the class that it names, "
        f"{config.get('class_name')!r} ({reason}). Pass the return value of "
        "`keras.saving.serialize_keras_object`. If the config comes from a file, the "
        "file may be damaged, or from another version of the class."
    )


def _check_address(config: dict[str, Any], what: str) -> None:
    """Raises a `ValueError` for a config that names no class as Keras does."""
    # Names that Keras uses for values. Keras itself rejects a lambda, in safe mode.
    name = str(config.get("class_name"))
    of_value = name.startswith("__") and name != "__lambda__"
    for key, cls, requirement in _ADDRESS:
        value = config.get(key)
        if not isinstance(value, cls) or (of_value and key == "class_name"):
            raise ValueError(
                f"The config of the {what} must hold {requirement} as its '{key}'. "
                f"Received: {key}={value!r}"
            )


# --- Keywords ---------------------------------------------------------------------

# Older versions of Keras wrote these keys into the config. They never had an effect.
_IGNORED_AT_THEIR_DEFAULTS = {
    "learning_rate": 0.0,
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
# Arguments of `DynamicLossScale` alone.
_OF_DYNAMIC = ("growth_factor", "backoff_factor", "hysteresis", "multiplier")
# Names of other packages that are not alike, or more like others.
_OTHER_NAMES = {
    "growth_interval": "dynamic_growth_steps",
    "loss_scale_window": "dynamic_growth_steps",
    "masters": "master_weights",
    "max_loss_scale": "max_scale",
    "min_loss_scale": "min_scale",
    "min_loss_scaling": "min_scale",
    **dict.fromkeys(_OF_DYNAMIC, "loss_scale"),
}


def refuse_unsupported(kwargs: dict[str, Any], cls: type, base: type) -> None:
    """Rejects all keywords of a class, and says what to write instead."""
    # In Keras's own words. `base` is the `LossScaleOptimizer`.
    for argument, default in _IGNORED_AT_THEIR_DEFAULTS.items():
        value = kwargs.pop(argument, default)
        if not isinstance(value, type(default)) or value != default:
            raise ValueError(
                f"{cls.__name__} does not support `{argument}`. "
                f"Instead, set `{argument}` on the `inner_optimizer`."
            )
    if not kwargs:
        return
    hint, known = "", inspect.signature(base).parameters
    for name in kwargs:
        for near in difflib.get_close_matches(_OTHER_NAMES.get(name, name), known, 1):
            hint = f" Did you mean `{near}`?"
            if near not in inspect.signature(cls).parameters:
                hint = " For a loss scale write `LossScaleOptimizer`."
            elif name in _OF_DYNAMIC:
                hint = f" Write `loss_scale=keras_lso.DynamicLossScale({name}=...)`."
    names = "`, `".join(kwargs)
    raise ValueError(f"{cls.__name__} does not support arguments: `{names}`.{hint}")
