"""Checks of arguments: each returns the value to keep, or says what to write."""

import inspect
import math
import operator
import os
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.tensors import FLOAT32_MAX, shown

# Returns the value to keep, given an argument's name and its value.
Check: TypeAlias = Callable[[str, Any], Any]

# The largest int32: most backends count steps in that dtype.
LARGEST_STEP = 2**31 - 1
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126
# The most rows of a buffer that lasts from step to step, and that a step may read.
LARGEST_BUFFER = 2**20


def refusal(
    argument: str, value: Any, requirement: str, error: type[Exception] = ValueError
) -> Exception:
    """Returns the error for an argument that does not meet a requirement."""
    # The text of a list shows that it is a list.
    kind = "" if isinstance(value, list) else f" of type {type(value).__name__}"
    return error(
        f"Argument `{argument}` must {requirement}. "
        f"Received: {argument}={shown(value)}{kind}"
    )


# Packages whose frames are not the user's code.
_LIBRARIES = ("keras_lso", "keras", "tensorflow", "jax", "torch", "contextlib")


def warn(message: str) -> None:
    """Warns at the user's line of code that led here, not at a library's line."""
    # `inspect.stack` also searches all modules for the file of each frame.
    frames = traceback.walk_stack(inspect.currentframe())
    roots = [f.f_globals.get("__name__", "").split(".")[0] for f, _ in frames]
    level = next((i for i, root in enumerate(roots) if root not in _LIBRARIES), 1)
    warnings.warn(message, stacklevel=level + 1)


def warn_of_idle_patterns(remarks: Iterable[str | None]) -> None:
    """Warns once with those of the remarks that are not None."""
    if texts := [remark for remark in remarks if remark]:
        warn(f"A pattern matches no variable, and excludes none: {'; '.join(texts)}")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, bools excluded."""
    numbers = (int, float, np.integer, np.floating)
    return isinstance(value, numbers) and not isinstance(value, bool)


def _as_float(value: float) -> float:
    """Returns a number as a float; inf for one that no float can hold."""
    # Comparisons would cast Python's floats to the narrow dtype of a number of NumPy's.
    # Python's integers can be too large for a float.
    try:
        return float(value)
    except OverflowError:
        return math.inf


def fits_float32(value: Any) -> bool:
    """Whether a number is finite in float32."""
    return abs(_as_float(value)) <= FLOAT32_MAX


def is_scale(value: Any) -> bool:
    """Whether `value` is a number that can be a loss scale."""
    # Its inverse, which multiplies gradients, must be a normal float32 as well:
    # compilers treat a subnormal number as 0.
    return is_number(value) and SMALLEST_SCALE <= _as_float(value) <= LARGEST_SCALE


def check_scale(argument: str, value: Any) -> float:
    """Returns `value` as a float if it can be a loss scale."""
    if not is_scale(value):
        requirement = (
            "be positive and finite in float32, and so must be its inverse: a number "
            "between 2.0**-126 and 2.0**126, such as 2.0**15"
        )
        error = ValueError if is_number(value) else TypeError
        raise refusal(argument, value, requirement, error)
    return float(value)


def check_bounds(
    min_scale: Any,
    max_scale: Any,
    names: tuple[str, str] = ("min_scale", "max_scale"),
    **initial: Any,
) -> None:
    """Raises a `ValueError` for bounds that cross, or exclude the initial scale."""
    if min_scale > max_scale:
        low, high = names
        raise ValueError(
            f"`{low}` must not be above `{high}`. "
            f"Received: {low}={min_scale}, {high}={max_scale}"
        )
    for name, value in initial.items():
        if not min_scale <= value <= max_scale:
            raise ValueError(
                f"`{name}` must lie between `min_scale` and `max_scale`. Received: "
                f"{name}={value}, min_scale={min_scale}, max_scale={max_scale}. "
                "Choose another scale, or widen the bounds."
            )


def _as_integer(value: Any) -> int | None:
    """Returns an integer or a whole float as an int; None for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return None
    # tf.keras and TF1 call int().
    if isinstance(value, (float, np.floating)):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_int(
    argument: str, value: Any, at_least: float = -math.inf, at_most: float = math.inf
) -> int:
    """Returns `value` as an int within the two limits."""
    number = _as_integer(value)
    if number is None or not at_least <= number <= at_most:
        limit = "" if at_least == -math.inf else f" of at least {at_least}"
        if number is not None and number > at_most:
            limit = f" of at most {at_most}"
        raise refusal(argument, value, f"be an integer{limit}")
    return number


check_positive_int = partial(check_int, at_least=1)
check_buffer = partial(check_int, at_least=1, at_most=LARGEST_BUFFER)
check_step = partial(check_int, at_least=0, at_most=LARGEST_STEP)


def check_factor(
    argument: str, value: Any, above: float, below: float = math.inf
) -> float:
    """Returns `value` as a float strictly between `above` and `below` in float32."""
    # There 1e-46 is 0, and 1 - 1e-9 is 1.
    is_finite = is_number(value) and fits_float32(value)
    if not is_finite or not above < np.float32(value) < below:
        span = f"above {above}" + (f" and below {below}" if below < math.inf else "")
        raise refusal(argument, value, f"be a finite number {span} in float32")
    return float(value)


check_positive = partial(check_factor, above=0.0)


def check_bool(argument: str, value: Any) -> bool:
    """Returns `value` as a bool; rejects numbers."""
    if not isinstance(value, (bool, np.bool_)):
        raise refusal(argument, value, "be True or False", TypeError)
    return bool(value)


def check_real(argument: str, value: Any, at_least: float = -math.inf) -> float:
    """Returns `value` as a float that is finite in float32."""
    if not is_number(value):
        raise refusal(argument, value, "be a number", TypeError)
    if not fits_float32(value):
        raise refusal(argument, value, "be finite in float32")
    if value < at_least:
        raise refusal(argument, value, f"be {at_least} or more")
    return float(value)


# As learning rates are.
check_rate = partial(check_real, at_least=0)


def check_callable_rate(argument: str, value: Any) -> Any:
    """Returns `value`; rejects a callable that a step cannot call for its rate."""
    if not callable(value) or isinstance(value, LearningRateSchedule):
        return value
    # A config can name any function of Keras, and each step would call it. The module
    # of a lambda that Keras has read from a file is Keras's, too.
    is_of_keras = str(getattr(value, "__module__", "")).split(".")[0] == "keras"
    is_lambda = getattr(value, "__name__", "") == "<lambda>"
    is_known = (is_of_keras and not is_lambda) or is_loss_scale(value)
    if is_known or not _takes_no_arguments(value):
        requirement = (
            "be a number, an instance of a "
            "`keras.optimizers.schedules.LearningRateSchedule` or your own function "
            f"without arguments. {schedule_hint(value)}"
        )
        raise refusal(argument, value, requirement, TypeError)
    return value


def _takes_no_arguments(function: Callable[..., Any]) -> bool:
    """Whether a function can be called without arguments, as far as is known."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # The function has no signature.
    return True


def check_decay(argument: str, value: Any) -> Any:
    """Returns a weight decay; rejects a schedule, which Keras's step cannot call."""
    if callable(value):
        requirement = (
            "be a number or None. Keras's optimizers decay by the learning rate times "
            "`weight_decay`, so it follows a schedule of the learning rate"
        )
        raise refusal(argument, value, requirement, TypeError)
    return value


def is_loss_scale(value: Any) -> bool:
    """Whether `value` is a loss-scale policy, whose class is above this module."""
    return hasattr(value, "initial_loss_scale")


def schedule_hint(value: Any) -> str:
    """Returns a hint on replacing a callable that is not a schedule, as a sentence."""
    if is_loss_scale(value):
        return "A loss scale is the argument `loss_scale` of a LossScaleOptimizer"
    # It may be a schedule of tf.keras, which Keras 3 does not accept.
    if isinstance(value, type):
        return "Give an instance, not the class"
    name = type(value).__name__
    if hasattr(keras.optimizers.schedules, name):
        return f"Write `keras.optimizers.schedules.{name}(...)`, the class of Keras 3"
    return (
        "Write a function of the step as the `__call__` of a subclass of "
        "`LearningRateSchedule`, which can be saved"
    )


def check_share(argument: str, value: Any) -> float:
    """Returns `value` as a float between 0 and 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise refusal(argument, value, "be a number between 0 and 1")
    return float(value)


def entries(count: int) -> str:
    """Returns a number of entries in words."""
    return f"{count} {'entry' if count == 1 else 'entries'}"


def check_list(argument: str, values: Any, at_least: int = 0) -> list[Any]:
    """Returns `values` as a list with at least `at_least` items."""
    is_array = isinstance(values, np.ndarray) and values.ndim > 0
    if not is_array and not isinstance(values, (list, tuple)):
        raise refusal(argument, values, "be a list", TypeError)
    if len(values) < at_least:
        raise refusal(argument, values, f"have at least {entries(at_least)}")
    return list(values)


def check_items(check: Check, argument: str, values: Any) -> list[Any]:
    """Returns the checked items of a list."""
    values = check_list(argument, values)
    return [check(f"{argument}[{i}]", value) for i, value in enumerate(values)]


def check_config(owner: str, config: Any) -> dict[str, Any]:
    """Returns a copy of the config of an `owner`; raises an error if it is not one."""
    if not isinstance(config, dict) or not all(isinstance(k, str) for k in config):
        raise TypeError(
            f"The config of a {owner} must be a dict with strings as its keys, as "
            f"`get_config` returns it. Received: config={config!r} of type "
            f"{type(config).__name__}"
        )
    return dict(config)


def check_choice(argument: str, value: Any, choices: Collection[Any]) -> Any:
    """Returns `value`, which must be one of `choices`."""
    # The comparison of an array has no truth value, and 0 and 1 equal False and True.
    if not isinstance(value, tuple(map(type, choices))) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise refusal(argument, value, f"be one of {known}")
    return value


def check_path(argument: str, value: Any) -> Any:
    """Returns a path of a file or a directory."""
    if not isinstance(value, str | os.PathLike):
        raise refusal(argument, value, "be a path", TypeError)
    return value


def check_operation_name(name: Any) -> None:
    """Raises a `TypeError` if the `name` that tf.keras's methods take is no string."""
    if isinstance(name, str | None):
        return
    requirement = (
        "be a string or None. To say whether the gradients are scaled, write "
        "`scaled=True` or `scaled=False`"
    )
    if not isinstance(name, bool):
        requirement = (
            "be a string or None. Gradients and variables come in pairs: write "
            "`apply_gradients(zip(grads, variables))`, or `apply(grads, variables)`"
        )
    raise refusal("name", name, requirement, TypeError)
