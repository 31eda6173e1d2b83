"""What the arguments of schedules have to be: the checks that only schedules need.

Each takes the argument's name and value, and returns the value to keep. The checks of
numbers in general are in `keras_lso._checks`.
"""

import functools

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._checks import (
    LARGEST_STEP,
    check_factor,
    check_int,
    check_list,
    check_rate,
    check_real,
    is_number,
)

check_positive = functools.partial(check_factor, above=0.0)
check_non_negative = functools.partial(check_int, at_least=0)
check_step = functools.partial(check_int, at_least=0, at_most=LARGEST_STEP)
check_some_steps = functools.partial(check_int, at_least=1, at_most=LARGEST_STEP)


def check_positive_power(argument, value):
    """Returns `value` as a positive float that is finite in float32."""
    return check_positive(argument, check_real(argument, value))


def optional(check):
    """Returns a check that lets None through."""
    return lambda argument, value: None if value is None else check(argument, value)


def list_of(check, at_least=0):
    """Returns a check of a list: of its length, then of each item."""

    def check_items(argument, values):
        values = check_list(argument, values, at_least)
        return [check(f"{argument}[{i}]", value) for i, value in enumerate(values)]

    return check_items


def check_name(argument, value):
    """Returns a string as it is."""
    if not isinstance(value, str):
        raise TypeError(
            f"Argument `{argument}` must be a string. Received: {argument}={value!r}"
        )
    return value


def check_schedule_or_rate(argument, value):
    """Returns a schedule as it is and a rate as a float."""
    if isinstance(value, LearningRateSchedule):
        return value
    if is_number(value):
        return check_rate(argument, value)
    hint = ""
    if isinstance(value, dict):
        hint = " Make a schedule of its config with `from_config` first."
    elif callable(value):
        hint = (
            " Give an instance, not the class; write a function as the `__call__` of "
            "a subclass of `LearningRateSchedule`, which can be saved."
        )
    raise TypeError(
        f"Argument `{argument}` must be a "
        "`keras.optimizers.schedules.LearningRateSchedule` or a number, the constant "
        f"rate.{hint} Received: {argument}={value!r} of type {type(value).__name__}"
    )


def check_float_dtype(argument, value):
    """Returns the name of a dtype of floats, NumPy's and the frameworks' included."""
    try:
        name = None if value is None else keras.backend.standardize_dtype(value)
    except (TypeError, ValueError):
        name = None
    if name is None or not keras.backend.is_float_dtype(name):
        raise ValueError(
            f"Argument `{argument}` must be a dtype of floats such as 'float32'. "
            f"Received: {argument}={value!r}"
        )
    return name
