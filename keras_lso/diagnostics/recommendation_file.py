"""Reads the JSON of a `Recommendation`, and rejects any other JSON."""

import json
import os
from collections.abc import Callable
from typing import Any

from keras_lso._backend.masters import KINDS as MASTERS
from keras_lso._core.checks import is_scale
from keras_lso.diagnostics.hardware import HARDWARE, check_hardware
from keras_lso.diagnostics.training_bytes import KINDS

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")
OPTIMIZERS = ("LossScaleOptimizer", "GuardedOptimizer")


def _is_hardware(value):
    try:
        return value != "auto" and bool(check_hardware(value))
    except ValueError:
        return False


def _is_list_of_strings(value):
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_bytes(value):
    return (
        isinstance(value, dict)
        and value.keys() == set(KINDS)
        and all(type(count) is int and count >= 0 for count in value.values())
    )


def _is_one_of(*values):
    # A list in the file is not hashable, and a number may equal a bool.
    return lambda value: any(value is v or value == v for v in values)


_LIST = "a list of strings"
_BYTES = f"a dict of whole numbers, of the keys {', '.join(KINDS)}"
# The requirement of each key: a check, and a description.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hardware": (_is_hardware, f"one of {HARDWARE}, except 'auto'"),
    "dtype_policy": (_is_one_of(*POLICIES), f"one of {', '.join(POLICIES)}"),
    "layers_in_float32": (_is_list_of_strings, _LIST),
    "initial_scale": (
        lambda value: value is None or is_scale(value),
        "a positive number or null",
    ),
    "master_weights": (
        _is_one_of(*MASTERS, None),
        f"one of {', '.join(MASTERS)}, or null",
    ),
    "optimizer": (
        _is_one_of(*OPTIMIZERS, None),
        f"one of {', '.join(OPTIMIZERS)}, or null",
    ),
    "bytes": (_are_bytes, _BYTES),
    "bytes_now": (_are_bytes, _BYTES),
    "reasons": (_is_list_of_strings, _LIST),
}


def read(path_or_text: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the attributes of the recommendation in a file, or in a text.

    Args:
        path_or_text: String or path of a file; or JSON, a string that begins with a
            brace.
    """
    text = str(path_or_text)
    is_text = isinstance(path_or_text, str) and text.lstrip().startswith("{")
    source = "a text" if is_text else f"path_or_text={text!r}"
    try:
        if not is_text:
            with open(path_or_text, encoding="utf-8") as file:
                text = file.read()
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"The recommendation is not valid JSON ({error}). Received: {source}"
        ) from error
    # The file of `keras-lso report` holds the reports as well.
    if isinstance(found, dict) and isinstance(found.get("recommendation"), dict):
        found = found["recommendation"]
    _check(found, source)
    return found


def _check(found, source):
    if not isinstance(found, dict) or found.keys() != _FIELDS.keys():
        keys = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(
            "The JSON of a recommendation must be a dict of the keys "
            f"{list(_FIELDS)}. Received: {source}, with {keys}"
        )
    for key, (is_right, words) in _FIELDS.items():
        if not is_right(found[key]):
            raise ValueError(
                f"'{key}' of a recommendation must be {words}. "
                f"Received: {source}, with {key}={found[key]!r}"
            )
    scales = found["optimizer"] == "LossScaleOptimizer"
    if scales is (found["initial_scale"] is None):
        raise ValueError(
            "A recommendation has an 'initial_scale' if its 'optimizer' is "
            f"LossScaleOptimizer, and only then. Received: {source}, with optimizer="
            f"{found['optimizer']!r}, initial_scale={found['initial_scale']!r}"
        )
