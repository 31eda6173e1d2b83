"""Matches the variables of a tf.keras file to those of a Keras 3 model."""

import collections
import re
from collections.abc import Sequence


def pair(names: Sequence[str | None], paths: Sequence[str]) -> list[int]:
    """Returns for each of `paths` the position of its variable in `names`."""
    # Names that agree determine the match. They rarely agree in full: Keras 3 prepends
    # the model's name, and numbers unnamed layers from the start in each process, so
    # that `dense_1` in a file may be any `dense_N` of the model. Elsewhere the order
    # determines it, and one that contradicts the names is an error.
    in_file = [tuple(n.removesuffix(":0").split("/")) for n in names if n is not None]
    in_model = [tuple(p.split("/")) for p in paths]
    if len(in_file) < len(names):
        return list(range(len(paths)))
    # As many trailing words as agree: at least the layer's and the variable's.
    for length in (4, 3, 2):
        order = _by_key(in_file, in_model, lambda words, n=length: words[-n:])
        is_unique = len({words[-length:] for words in in_file}) == len(in_file)
        if order is not None and is_unique:
            return order
    order = _by_key(in_file, in_model, _unnumbered)
    if order is None:
        # Renamed layers: match the names of the variables alone, or else the order.
        order = _by_key(in_file, in_model, lambda words: words[-1])
        order = order or list(range(len(paths)))
        _check_order(in_file, in_model, order)
    return order


def _by_key(names, paths, key):
    """Matches names and paths of the same key in order; None if the counts differ."""
    positions: dict = collections.defaultdict(collections.deque)
    for i, name in enumerate(names):
        positions[key(name)].append(i)
    order = []
    for path in paths:
        if not positions[key(path)]:
            return None
        order.append(positions[key(path)].popleft())
    return None if any(positions.values()) else order


def _unnumbered(words):
    """Returns the last two words, without the numbers that Keras gives to layers."""
    return tuple(re.sub(r"_\d+$", "", word) for word in words[-2:])


def _check_order(names, paths, order):
    """Raises an error if a variable of a pair has a namesake outside the pair."""
    saved, own = set(map(_unnumbered, names)), set(map(_unnumbered, paths))
    for path, index in zip(paths, order, strict=True):
        name = names[index]
        name_key, path_key = _unnumbered(name), _unnumbered(path)
        if name_key != path_key and (name_key in own or path_key in saved):
            raise ValueError(
                "The names of the variables neither agree nor are all of them new, so "
                f"that '{'/'.join(name)}' of the file might be taken for "
                f"'{'/'.join(path)}'. Name the layers as in the model that was saved: "
                f"{sorted({'/'.join(n[:-1]) for n in names})}."
            )
