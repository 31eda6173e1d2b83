"""Checks of the arguments of schedules: `check.rate`, `check.positive_int` etc.

Each check takes the argument's name and value, and returns the value to keep or raises
an error. General checks of numbers come from `_core/checks.py`; the others are only for
schedules.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core import checks
from keras_lso._core.checks import check_choice

any_list = checks.check_list
boolean = checks.check_bool
choice = check_choice
integer = checks.check_int
non_negative_int = partial(integer, at_least=0)
positive = partial(checks.check_factor, above=0.0)
positive_int = checks.check_positive_int
rate = checks.check_rate
real = checks.check_real
share = checks.check_share
step = partial(integer, at_least=0, at_most=checks.LARGEST_STEP)
length = partial(integer, at_least=1, at_most=checks.LARGEST_STEP)


def optional(check: Callable[[str, Any], Any], argument: str, value: Any) -> Any:
    """Returns the checked value, or None for None."""
    return None if value is None else check(argument, value)


def positive_rate(argument: str, value: Any) -> float:
    """Returns a rate above zero as a float, for a curve that never reaches zero."""
    value = rate(argument, value)
    if value == 0:
        requirement = "be above zero if the decay is exponential"
        raise checks.refusal(argument, value, requirement)
    return value


def at_most_one(argument: str, value: Any) -> float:
    """Returns a positive number of at most 1 as a float."""
    value = positive(argument, value)
    if value > 1:
        raise checks.refusal(argument, value, "be at most 1")
    return value


def list_of(
    check: Callable[[str, Any], Any], argument: str, values: Any, at_least: int = 0
) -> list[Any]:
    """Returns the checked items of a list that has at least `at_least` items."""
    values = any_list(argument, values, at_least)
    return [check(f"{argument}[{i}]", value) for i, value in enumerate(values)]


def name(value: Any, cls: type) -> str:
    """Returns the name of a schedule, by default the name of its class."""
    # The Model Garden's configs may hold None.
    value = cls.__name__ if value is None else value
    if not isinstance(value, str):
        raise TypeError(f"Argument `name` must be a string. Received: name={value!r}")
    return value


def schedule_or_rate(argument: str, value: Any) -> Any:
    """Returns a schedule unchanged, and a rate as a float."""
    if isinstance(value, LearningRateSchedule):
        return value
    if checks.is_number(value):
        return rate(argument, value)
    hint = ""
    if isinstance(value, dict):
        hint = " Make a schedule from its config with `from_config` first."
    elif callable(value):
        hint = f" {checks.schedule_hint(value)}."
    raise TypeError(
        f"Argument `{argument}` must be a "
        "`keras.optimizers.schedules.LearningRateSchedule` or a number, the constant "
        f"rate.{hint} Received: {argument}={value!r} of type {type(value).__name__}"
    )


def boundaries(values: Any, count: int, reason: str) -> list[int]:
    """Returns boundaries as a list of `count` strictly increasing steps."""
    steps = list_of(step, "boundaries", values)
    if len(steps) != count:
        requirement = f"have {checks.entries(count)}, {reason}"
        raise checks.refusal("boundaries", steps, requirement)
    if any(low >= high for low, high in itertools.pairwise(steps)):
        raise checks.refusal("boundaries", steps, "be strictly increasing")
    return steps
