"""A batch in a `.npz` file, which an untrusted party may have written.

NumPy can unpickle objects, and it allocates an array of the size in a header before it
checks whether the file is that large. This module prevents both.
"""

import math
import os
import zipfile
from typing import Any

import keras
import numpy as np

from keras_lso.compat.untrusted_files import DAMAGE, refuse_bombs

KEYS = (
    "`x`, `y` and `sample_weight`, or `x_NAME` and `y_NAME` for each of several inputs "
    "and outputs"
)


def read_batch(path: str | os.PathLike[str]) -> tuple[Any, Any, Any]:
    """Returns the inputs, the targets and the sample weights in a file.

    Floats are cast to `floatx`, as `fit` casts them. Several inputs or targets are
    returned as a dict by name.

    Args:
        path: String or path of a `.npz` file, as `numpy.savez` writes it.

    Raises:
        OSError: If the file cannot be opened.
        ValueError: If the file has another format, is damaged, would fill the memory,
            or holds arrays that do not belong to a batch.
    """
    path = os.fspath(path)
    with open(path, "rb"):  # Its `OSError` says what is wrong.
        pass
    try:
        arrays = _arrays_in(path)
        return _sorted(arrays)
    except (*DAMAGE, MemoryError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"The batch cannot be read. Received: {path!r}, and the error: "
            f"{kind}{error}"
        ) from error


def _arrays_in(path):
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "It is not a `.npz` file. Write one with `numpy.savez(path, x=x, y=y)`."
        )
    with zipfile.ZipFile(path) as archive:
        refuse_bombs(archive)
        for item in archive.infolist():
            with archive.open(item) as file:
                _check_size(file, item)
    with np.load(path, allow_pickle=False) as arrays:
        return {name: _as_in_fit(arrays[name]) for name in arrays.files}


_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _check_size(file, item):
    """Raises an error if the header of an array does not match its size."""
    try:
        version = np.lib.format.read_magic(file)
        header = _HEADERS[version](file) if version in _HEADERS else None
    except (*DAMAGE, MemoryError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"'{item.filename}' is not a NumPy array.") from error
    if header is None:
        raise ValueError(f"'{item.filename}' has an unknown version of NumPy's format.")
    shape, _, dtype = header
    if dtype.hasobject:
        raise ValueError(
            f"'{item.filename}' holds Python objects, which are not loaded. Save "
            "arrays of numbers."
        )
    size, rest = math.prod(shape) * dtype.itemsize, item.file_size - file.tell()
    if size != rest:
        raise ValueError(
            f"'{item.filename}' is damaged: it holds {rest} bytes, but its header "
            f"says {size}."
        )


def _as_in_fit(array):
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):
        return array.astype(keras.config.floatx())


def _sorted(arrays):
    """Sorts the arrays of a file into inputs, targets and sample weights."""
    known: dict[str, dict] = {"x": {}, "y": {}}
    for name, array in arrays.items():
        part, separator, rest = name.partition("_")
        if part in known and bool(separator) == bool(rest):
            known[part][rest] = array
        elif name != "sample_weight":
            raise ValueError(f"It must hold {KEYS}. It holds {sorted(arrays)}.")
    if not known["x"]:
        raise ValueError(f"It must hold {KEYS}. It holds {sorted(arrays)}.")
    x, y = (_one_or_all(known[part], part, arrays) for part in ("x", "y"))
    return x, y, arrays.get("sample_weight")


def _one_or_all(found, part, arrays):
    """Returns the array of a part, a dict if there are several, or None."""
    if "" in found and len(found) > 1:
        raise ValueError(
            f"It must hold `{part}` or arrays `{part}_NAME`, not both. It holds "
            f"{sorted(arrays)}."
        )
    return found.get("", found or None)
