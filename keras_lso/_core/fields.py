"""Declared arguments of a constructor, whose types hold the checks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import keras

from keras_lso._core import checks
from keras_lso._core.checks import Check

_ClassT = TypeVar("_ClassT", bound=type)

Rate = Annotated[float, checks.check_rate]
Real = Annotated[float, checks.check_real]
Positive = Annotated[float, checks.check_positive]
AboveOne = Annotated[float, partial(checks.check_factor, above=1.0)]
Fraction = Annotated[float, partial(checks.check_factor, above=0.0, below=1.0)]
Share = Annotated[float, checks.check_share]
Scale = Annotated[float, checks.check_scale]
Count = Annotated[int, checks.check_positive_int]
Step = Annotated[int, checks.check_step]
Length = Annotated[
    int, partial(checks.check_int, at_least=1, at_most=checks.LARGEST_STEP)
]


def registered(name: str) -> Callable[[_ClassT], _ClassT]:
    """Returns a decorator: Keras finds a class in configs by this name."""

    def decorate(cls: Any) -> Any:
        init = cls.__init__
        hints = get_type_hints(init, include_extras=True)
        # Those are not declared, or checked by another function.
        others = "inner_optimizer", "kwargs", "return"
        cls._checks = {n: _check_of(h) for n, h in hints.items() if n not in others}
        # `help` shows the types without their checks.
        init.__annotations__ = get_type_hints(init) | {"return": None}
        # Keras writes `__name__` as the `class_name`, next to the registered name.
        cls.__name__ = name
        return keras.saving.register_keras_serializable("keras_lso", name=name)(cls)

    return decorate


def check_fields(instance: Any) -> None:
    """Replaces the arguments by what their checks return."""
    for name, check in instance._checks.items():
        setattr(instance, name, check(name, getattr(instance, name)))


def _check_of(hint: Any) -> Check:
    """Returns the check of an argument of this type."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return parts[1]
    if get_origin(hint) is Literal:
        return partial(checks.check_choice, choices=parts)
    if get_origin(hint) is Sequence:
        return partial(checks.check_items, _check_of(parts[0]))
    if type(None) in parts:
        return partial(_check_optional, _check_of(parts[0]))
    by_type: dict[type, Check] = {
        int: checks.check_int,
        bool: checks.check_bool,
        str: _check_name,
    }
    return by_type[hint]


def _check_optional(check: Check, argument: str, value: Any) -> Any:
    """Returns the checked value, or None for None."""
    return None if value is None else check(argument, value)


def _check_name(argument: str, value: Any) -> str | None:
    """Returns the name of an optimizer or a schedule, which may be None."""
    if value is not None and not isinstance(value, str):
        raise checks.refusal("name", value, "be a string", TypeError)
    return value
