"""Checks of the arguments of optimizers, schedules and methods.

`_core/checks.py` checks the arguments of `LossScaleOptimizer` and the loss scales.
"""

import os
from collections.abc import Iterable
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._core.checks import check_callable_rate, check_rate, refusal


def check_learning_rate(argument: str, value: Any) -> Any:
    """Returns a learning rate that Keras takes; a number as a float."""
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return value
    if not callable(value):
        return check_rate(argument, value)
    return check_callable_rate(argument, value)


def check_choice(argument: str, value: Any, choices: Iterable[Any]) -> Any:
    """Returns `value`, which must be one of the strings or ints in `choices`."""
    # The comparison of an array has no truth value.
    if not isinstance(value, str | int) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise refusal(argument, value, f"be one of {known}")
    return value


def check_path(argument: str, value: Any) -> Any:
    """Returns a path of a file or a directory."""
    if not isinstance(value, str | os.PathLike):
        raise refusal(argument, value, "be a path", TypeError)
    return value


def check_names(owner: str, argument: str, params: Any, known: Iterable[str]) -> None:
    """Raises a `ValueError` if a dict has a parameter that `owner` does not know."""
    for name in params:
        if name not in known:
            raise ValueError(
                f"{owner} has no parameter {name!r}. It takes "
                f"{', '.join(map(repr, known))}. Received: {argument}={params!r}"
            )


def check_operation_name(name: Any) -> None:
    """Raises a `TypeError` if the `name` that tf.keras's methods take is no string."""
    if name is not None and not isinstance(name, str):
        requirement = (
            "be a string or None. To say whether the gradients are scaled, write "
            "`scaled=True` or `scaled=False`"
        )
        raise refusal("name", name, requirement, TypeError)


def check_variable_option(argument: str, value: Any, choices: Iterable[Any]) -> str:
    """Returns one of the strings in `choices`, which TensorFlow has as an enum."""
    if value is None:
        return "none"
    return check_choice(argument, str(getattr(value, "name", value)).lower(), choices)


def check_variables(argument: str, variables: Any) -> list[Any]:
    """Returns `variables` as a flat list of variables."""
    variables = keras.tree.flatten(variables)
    for variable in variables:
        if not backend.is_variable(variable):
            raise ValueError(
                f"Argument `{argument}` takes variables only, such as "
                "`model.trainable_variables`. Received: "
                f"{variable!r} of type {type(variable).__name__}"
            )
    if len({id(v) for v in variables}) < len(variables):
        names = [v.name for v in variables]
        raise ValueError(f"Argument `{argument}` holds a variable twice: {names}")
    return variables
