"""What the arguments of schedules have to be: `check.rate`, `check.positive_int` etc.

Each check takes the argument's name and value, and returns the value to keep or raises
an error. Checks of numbers in general are those of `_core/checks.py`; the others are
for schedules alone.
"""

import itertools
from functools import partial

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core import checks

any_list = checks.check_list
boolean = checks.check_bool
integer = checks.check_int
non_negative_int = partial(integer, at_least=0)
positive = partial(checks.check_factor, above=0.0)
positive_int = checks.check_positive_int
rate = checks.check_rate
real = checks.check_real
share = checks.check_share
some_steps = partial(integer, at_least=1, at_most=checks.LARGEST_STEP)
step = partial(integer, at_least=0, at_most=checks.LARGEST_STEP)


def positive_power(argument, value):
    """Returns `value` as a positive float that is finite in float32."""
    return positive(argument, real(argument, value))


def optional(check):
    """Returns a check that lets None through."""
    return lambda argument, value: None if value is None else check(argument, value)


def list_of(check, at_least=0):
    """Returns a check of a list: of its length, then of each item."""

    def check_items(argument, values):
        values = any_list(argument, values, at_least)
        return [check(f"{argument}[{i}]", value) for i, value in enumerate(values)]

    return check_items


def name(argument, value):
    """Returns a string as it is."""
    if not isinstance(value, str):
        raise TypeError(
            f"Argument `{argument}` must be a string. Received: {argument}={value!r}"
        )
    return value


def schedule_or_rate(argument, value):
    """Returns a schedule as it is and a rate as a float."""
    if isinstance(value, LearningRateSchedule):
        return value
    if checks.is_number(value):
        return rate(argument, value)
    hint = ""
    if isinstance(value, dict):
        hint = " Make a schedule of its config with `from_config` first."
    elif callable(value):
        hint = f" {checks.schedule_hint(value)}."
    raise TypeError(
        f"Argument `{argument}` must be a "
        "`keras.optimizers.schedules.LearningRateSchedule` or a number, the constant "
        f"rate.{hint} Received: {argument}={value!r} of type {type(value).__name__}"
    )


def float_dtype(argument, value):
    """Returns the name of a dtype of floats, NumPy's and the frameworks' included."""
    try:
        dtype = None if value is None else keras.backend.standardize_dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not keras.backend.is_float_dtype(dtype):
        raise ValueError(
            f"Argument `{argument}` must be a dtype of floats such as 'float32'. "
            f"Received: {argument}={value!r}"
        )
    return dtype


def boundaries(values, count, reason):
    """Returns boundaries as a list of `count` strictly increasing steps."""
    steps = list_of(step)("boundaries", values)
    if len(steps) != count:
        requirement = f"have {checks.entries(count)}, {reason}"
        raise checks.refusal("boundaries", steps, requirement)
    if any(low >= high for low, high in itertools.pairwise(steps)):
        raise checks.refusal("boundaries", steps, "be strictly increasing")
    return steps
