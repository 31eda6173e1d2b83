"""Exclusions by arguments, and a warning of patterns that exclude nothing.

Names differ between libraries, and between versions of Keras: `LayerNorm` became
`layer_norm`. A pattern that matches nothing changes nothing, and training shows this
late, if at all. `build` therefore checks each pattern, and warns once.

Lists of patterns are passed on from model to model, and may name layers that a model
does not have. A pattern without a match is not a mistake as long as another pattern of
its list matches, unless it is similar to a variable that nothing excludes. In
`["LayerNorm", "bias"]` the first pattern matches nothing, and most likely means
`layer_norm/gamma`, which decays. In `["LayerNorm", "layer_norm", "bias"]` the second
pattern matches that variable, so there is no warning.
"""

import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from keras_lso._core.checks import check_patterns, warn
from keras_lso._core.gradients import as_list, list_of_variables
from keras_lso._core.near_names import meant_by, nearest, rewritten
from keras_lso._keras_internals.keras_version import excludes_before_build_alone
from keras_lso._keras_internals.optimizers import (
    chain_of,
    names_excluded_by,
    optimizers_in,
    stepping,
    uses_weight_decay,
    variables_of,
)
from keras_lso._keras_internals.variables import (
    as_stepped,
    is_found,
    path_matches,
    path_of,
    with_and_without_end,
)


def check_exclusions(optimizer, var_list, var_names):
    """Returns both arguments of `exclude_from_weight_decay` as lists, or as None.

    Args:
        optimizer: The optimizer whose method was called. It may wrap others.
        var_list: See the method.
        var_names: See the method.

    Raises:
        ValueError: If the installed version of Keras takes no exclusions after `build`.
    """
    if var_list is not None:
        var_list = list_of_variables("var_list", var_list)
    if var_names is not None:
        var_names = as_list("var_names", var_names, "regular expressions")
        var_names = check_patterns("var_names", var_names)
    if excludes_before_build_alone() and any(o.built for o in optimizers_in(optimizer)):
        name = type(chain_of(optimizer)[-1]).__name__
        raise ValueError(
            f"The {name} has been built, and from Keras 3.16 on `build` decides which "
            "variables decay: call `exclude_from_weight_decay` before it. "
            "The first step calls `build`, and so does `fit`. Make a new optimizer, "
            f"and call the method first: `optimizer = {name}(...); optimizer."
            'exclude_from_weight_decay(var_names=["bias"])`. '
            f"Received: var_list={var_list}, var_names={var_names}"
        )
    return var_list, var_names


class Exclusion(NamedTuple):
    """The exclusion of variables by the patterns of an optimizer's argument.

    Attributes:
        optimizer: The optimizer, which has been built.
        argument: String, the name of the argument.
        patterns: List of regular expressions, or None.
        finds: Callable that takes a pattern and a variable, and returns whether the
            pattern is found in the variable's name.
        excludes: Callable that takes a variable and returns whether it is excluded, for
            any reason.
        where: String, the names in which patterns are searched.
        is_alone: Bool. False if another argument already excludes the variables that
            such lists are written for. Defaults to `True`.
    """

    optimizer: object
    argument: str
    patterns: list[str] | None
    finds: Callable
    excludes: Callable
    where: str
    is_alone: bool = True

    def finds_any(self, pattern):
        """Whether a pattern is found in any of the variables' names."""
        return any(self.finds(pattern, v) for v in variables_of(self.optimizer))


def by_paths(optimizer, argument, patterns, excludes=None, is_alone=True):
    """Returns the `Exclusion` by patterns that are searched in paths.

    Args:
        optimizer: See `Exclusion`.
        argument: See `Exclusion`.
        patterns: See `Exclusion`.
        excludes: See `Exclusion`. Defaults to `None`: only these patterns exclude.
        is_alone: See `Exclusion`.
    """

    def finds(pattern, variable):
        return path_matches(variable, [pattern])

    excludes = excludes or (lambda variable: path_matches(variable, patterns))
    where = f"paths such as {_first(path_of, optimizer)}"
    return Exclusion(optimizer, argument, patterns, finds, excludes, where, is_alone)


def by_names(optimizer, name_of=operator.attrgetter("name"), search=is_found):
    """Returns the `Exclusion` by the names passed to `exclude_from_weight_decay`.

    Args:
        optimizer: See `Exclusion`.
        name_of: Callable that takes a variable and returns the name to search. Defaults
            to the variable's own name, as in the package's optimizers.
        search: Callable that takes a compiled pattern and a name. Defaults to
            `is_found`.
    """
    names = names_excluded_by(optimizer)
    given = set(alternatives(names.pattern)) if names else set()
    # The user does not know the patterns that a wrapper has added.
    added = {form for p in given for form in with_and_without_end([p])[1:]} & given

    def finds(pattern, variable):
        forms = [pattern, *added.intersection(with_and_without_end([pattern]))]
        name = name_of(variable)
        return any(search(re.compile(form, names.flags), name) for form in forms)

    return Exclusion(
        optimizer,
        "exclude_from_weight_decay(var_names=...)",
        sorted(given - added),
        finds,
        lambda variable: not uses_weight_decay(optimizer, variable),
        f"names such as {_first(name_of, optimizer)}. For a part of the path write "
        "`var_list=[v for v in model.trainable_variables if 'layer_norm' in v.path]`",
    )


def _first(name_of, optimizer):
    return next((repr(name_of(v)) for v in variables_of(optimizer)), "")


def by_inner_names(wrapper):
    """Returns the `Exclusion`s by names of the optimizers inside a wrapper.

    The package's optimizers, and a wrapper in between, check them in their own `build`.
    """
    inner = wrapper.inner_optimizer
    steppers = stepping(inner) if chain_of(inner) == [inner] else []
    return [
        by_names(o, lambda v: as_stepped(v).name, re.Pattern.search)
        for o in steppers
        if o.built and not getattr(o, "_looks_at_patterns", False)
    ]


def alternatives(pattern):
    """Splits a regular expression at each `|` outside groups and sets."""
    parts, depth, in_set, start = [], 0, False, 0
    for token in re.finditer(r"\\.|[][()|]", pattern):
        text = token.group()
        if in_set:
            in_set = text != "]"
        elif text == "[":
            in_set = True
        elif text == "|" and not depth:
            parts.append(pattern[start : token.start()])
            start = token.end()
        else:
            depth += {"(": 1, ")": -1}.get(text, 0)
    return [*parts, pattern[start:]]


# --- The warning ----------------------------------------------------------------------


def warn_of_idle_patterns(exclusions):
    """Warns once of the patterns of a list of `Exclusion`s that exclude nothing."""
    remarks = [remark for e in exclusions for remark in _remarks(e)]
    if remarks:
        warn(f"A pattern matches no variable, and excludes none: {'; '.join(remarks)}")


def _remarks(exclusion):
    """Returns the remarks about an argument, a list of strings."""
    if not exclusion.patterns or not variables_of(exclusion.optimizer):
        return []
    idle = [p for p in exclusion.patterns if not exclusion.finds_any(p)]
    is_mistake = exclusion.is_alone and len(idle) == len(exclusion.patterns)
    texts = [text for p in idle if (text := _remark(exclusion, p, is_mistake))]
    if not texts:
        return []
    owner = type(exclusion.optimizer).__name__
    return [
        f"{', '.join(texts)} of `{exclusion.argument}` in {owner}, searched in "
        f"{exclusion.where}"
    ]


def _remark(exclusion, pattern, is_mistake):
    """Returns the remark about a pattern without a match; None if there is none.

    Args:
        exclusion: The `Exclusion`.
        pattern: String.
        is_mistake: Whether the pattern is a mistake even if no name is similar.
    """
    variables = variables_of(exclusion.optimizer)
    other = next(filter(exclusion.finds_any, rewritten(pattern)), None)
    if other is not None:
        meant = [v for v in variables if exclusion.finds(other, v)]
    else:
        meant = meant_by(pattern, variables)
    if all(map(exclusion.excludes, meant)) and (meant or not is_mistake):
        return None
    if other is not None:
        return f"{pattern!r} (write {other!r})"
    names, are_near = nearest(pattern, meant or variables)
    listed = ", ".join(map(repr, names))
    return f"{pattern!r} ({'near it' if are_near else 'names here'}: {listed})"
