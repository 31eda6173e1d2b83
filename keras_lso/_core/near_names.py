"""Finds the names that a pattern without a match may mean."""

import difflib
import re

from keras_lso._keras_internals.variables import path_of

# The least likeness of two words that differ by a slip, and of two similar words.
_A_SLIP, _SIMILAR = 0.85, 0.7
_MOST_NAMES = 3
# The least number of letters of a part for a comparison of beginnings.
_SHORTEST = 4


def rewritten(pattern):
    """Returns patterns that a pattern may mean, with the names of Keras 3."""
    spelled = [pattern]
    if "\\" not in pattern:
        # `LayerNorm` is the old name of `layer_norm`.
        parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", pattern)
        spelled.append(parted.lower())
    patterns = []
    for start in ("(^|/)", ""):
        for text in spelled:
            # A path begins with the names of layers.
            text = start + text[1:] if text.startswith(("^", "/")) else text
            without_number = re.sub(r":0(?=\$?$)", "", text)
            patterns += [text, without_number, without_number.removesuffix("$")]
    return patterns


def meant_by(pattern, variables):
    """Returns the variables whose paths have all words of a pattern, up to a slip."""
    words = _words(pattern)
    paths = [_names_in(path_of(v)) for v in variables]
    known = {name for path in paths for name in path}
    near = {(w, n) for w in words for n in known if _likeness(w, n) >= _A_SLIP}
    return [
        variable
        for variable, path in zip(variables, paths, strict=True)
        if words and all(any((w, name) in near for name in path) for w in words)
    ]


def nearest(pattern, variables):
    """Returns the most similar names, and whether they are similar enough."""
    words = _words(pattern)
    likeness = {
        name: max((_likeness(word, name) for word in words), default=0.0)
        for name in dict.fromkeys(n for v in variables for n in _names_in(path_of(v)))
    }
    names = sorted(likeness, key=likeness.__getitem__, reverse=True)
    near = [name for name in names if likeness[name] >= _SIMILAR]
    return (near or names)[:_MOST_NAMES], bool(near)


def _words(pattern):
    """Returns the words in a regular expression, with its spelling."""
    # Without flags such as (?i), and escapes such as \b.
    text = re.sub(r"\(\?[a-z]+\)|\\.", " ", pattern).replace("_?", "_")
    return [word for word in re.findall(r"\w+", text) if len(_letters(word)) > 1]


def _names_in(path):
    """Returns the names in a path, without the numbers that Keras gives to layers."""
    return [re.sub(r"_\d+$", "", name) for name in re.split(r"[/.]", path)]


def _likeness(word, name):
    """Returns the likeness of a word to a name or to parts of it, up to 1."""
    given, parts = _letters(word), _parts(name)
    if given in _letters(name) or _initials(_parts(word)) in parts:
        return 1.0
    ends = [parts[start:] for start in range(len(parts))]
    if any(_begin_alike(_parts(word), e) or _initials(e) == given for e in ends):
        return 1.0
    compared = difflib.SequenceMatcher(None, b=given)
    likeness = 0.0
    for end in ends:
        for letters in ("".join(end), "".join(end)[: len(given)]):
            compared.set_seq1(letters)
            if compared.quick_ratio() > likeness:
                likeness = max(likeness, compared.ratio())
    return likeness


def _letters(text):
    return re.sub(r"[\W_]", "", text.lower())


def _parts(text):
    """Returns the parts of a name, `layer` and `norm` of `LayerNorm`, in lower case."""
    return tuple(map(str.lower, re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)))


def _begin_alike(parts, others):
    """Whether several parts equal others, or are beginnings of them or extend them.

    An example is `layer` and `normalization` for `layer` and `norm`. A single part says
    too little: `layernorm` begins with `layer`.
    """
    pairs = zip(parts, others, strict=False)
    return 1 < len(parts) <= len(others) and all(
        a == b or (min(len(a), len(b)) >= _SHORTEST and a.startswith(b[: len(a)]))
        for a, b in pairs
    )


def _initials(parts):
    """Returns `bn` for `batch` and `norm`; None for a single part."""
    return "".join(part[0] for part in parts) if len(parts) > 1 else None
