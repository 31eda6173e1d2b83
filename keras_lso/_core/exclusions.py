"""Exclusions by arguments, and a warning of patterns that exclude nothing."""

# Names differ between libraries and versions of Keras: `LayerNorm` became `layer_norm`.

import operator
import re
from collections.abc import Callable
from typing import Annotated, Any

import keras

from keras_lso._backend.tensors import Variables
from keras_lso._core.checks import refusal
from keras_lso._core.gradients import as_list, list_of_variables
from keras_lso._keras_internals.optimizers import (
    chain_of,
    innermost_of,
    is_keras_3_16,
    names_excluded_by,
    optimizers_in,
    variables_of,
)
from keras_lso._keras_internals.variables import (
    as_stepped,
    is_found,
    path_of,
    with_and_without_end,
)


def check_patterns(argument: str, value: Any) -> list[str] | None:
    """Returns a list of regular expressions, or None for None."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        requirement = "be a list of regular expressions, such as ['bias', 'gamma']"
        raise refusal(argument, value, requirement, TypeError)
    for pattern in value:
        if not isinstance(pattern, str):
            raise refusal(argument, value, "hold strings", TypeError)
        try:
            re.compile(pattern)
        except re.error as error:
            requirement = (
                f"hold regular expressions. {pattern!r} is not one: {error}. To match "
                f"it literally, write {re.escape(pattern)!r}"
            )
            raise refusal(argument, value, requirement) from error
    return list(value)


Patterns = Annotated[list[str] | tuple[str, ...] | None, check_patterns]


def check_exclusions(
    optimizer: keras.Optimizer, var_list: Any, var_names: Any
) -> tuple[Variables | None, list[str] | None]:
    """Returns both arguments of `exclude_from_weight_decay` as lists, or as None."""
    if var_list is not None:
        var_list = list_of_variables("var_list", var_list)
    if var_names is not None:
        var_names = as_list("var_names", var_names, "regular expressions")
        var_names = check_patterns("var_names", var_names)
    if is_keras_3_16() and any(o.built for o in optimizers_in(optimizer)):
        name = type(chain_of(optimizer)[-1]).__name__
        raise ValueError(
            f"The {name} has been built, and from Keras 3.16 on `build`, which `fit` "
            "and the first step call, decides which variables decay. Make a new "
            "optimizer, and call the method before it: `optimizer = "
            f"{name}(...); optimizer.exclude_from_weight_decay(...)`. "
            f"Received: var_list={var_list}, var_names={var_names}"
        )
    return var_list, var_names


def idle_in_paths(
    optimizer: keras.Optimizer, argument: str, patterns: list[str] | None
) -> str | None:
    """Returns a remark on the patterns found in no path; None if there are none."""
    paths = [path_of(v) for v in variables_of(optimizer)]
    idle = [p for p in patterns or [] if not any(is_found(p, path) for path in paths)]
    return _remark(optimizer, argument, idle, paths, "paths")


def idle_in_names(
    optimizer: keras.Optimizer,
    name_of: Callable[[keras.Variable], str] = operator.attrgetter("name"),
    search: Callable[[re.Pattern[str], str], Any] = is_found,
) -> str | None:
    """Returns a remark on idle names given to `exclude_from_weight_decay`, or None."""
    excluded = names_excluded_by(optimizer)
    given = sorted(_alternatives(excluded.pattern)) if excluded else []
    names = [name_of(v) for v in variables_of(optimizer)]
    flags = excluded.flags if excluded else 0
    matching = {p for p in given if any(search(re.compile(p, flags), n) for n in names)}
    # A wrapper adds a form without TensorFlow's `:0`, which its user has not written.
    forms = {p: with_and_without_end([p]) for p in given}
    added = {form for pair in forms.values() for form in pair[1:]}
    idle = [p for p in given if p not in added and matching.isdisjoint(forms[p])]
    argument = "exclude_from_weight_decay(var_names=...)"
    remark = _remark(optimizer, argument, idle, names, "names")
    return remark and (
        f"{remark}. For a part of the path write `var_list=[v for v in "
        "model.trainable_variables if 'layer_norm' in v.path]`"
    )


def idle_in_inner_names(wrapper: keras.Optimizer) -> list[str | None]:
    """Returns the remarks on the optimizers inside a wrapper."""
    # A wrapper in between, and the package's own optimizers, warn in their `build`.
    inner = wrapper.inner_optimizer
    bases = innermost_of(inner) if chain_of(inner) == [inner] else []
    return [
        idle_in_names(o, lambda v: as_stepped(v).name, re.Pattern.search)
        for o in bases
        if o.built and not hasattr(o, "_idle_patterns")
    ]


def _alternatives(pattern: str) -> list[str]:
    """Splits the expression into which Keras joins patterns, if its parts are whole."""
    parts = pattern.split("|")
    try:
        return [re.compile(part).pattern for part in parts]
    except re.error:  # A `|` within a group or a set.
        return [pattern]


def _remark(
    optimizer: keras.Optimizer,
    argument: str,
    idle: list[str],
    names: list[str],
    kind: str,
) -> str | None:
    """Returns the text on idle patterns; None if all exclude a variable."""
    if not idle or not names:
        return None
    # Without the numbers that Keras gives to layers.
    parts = [re.sub(r"_\d+$", "", p) for name in names for p in re.split("[/.]", name)]
    known = list(dict.fromkeys(parts))[:20]
    return (
        f"{', '.join(map(repr, idle))} of `{argument}` in {type(optimizer).__name__}, "
        f"searched in {kind} such as {names[0]!r}, with these parts: "
        f"{', '.join(map(repr, known))}"
    )
