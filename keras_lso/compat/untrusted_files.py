"""Checks of archives and HDF5 files, which an untrusted party may have written.

A small file must not fill the memory or the disk, nor refer to another file. Keras
checks the files that it reads itself; these checks are for the files read here.
"""

import itertools
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

# The errors of h5py, json and zipfile for a damaged file, other than ValueError.
DAMAGE = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,  # the most frequent one of h5py
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)

# Trained numbers hardly compress; zeros compress a thousandfold.
_LARGE = 1 << 28
_MOST_EXPANSION = 100


def refuse_bombs(archive: zipfile.ZipFile) -> None:
    """Raises a `ValueError` if a member of an archive is large only once unpacked."""
    for item in archive.infolist():
        if _is_bomb(item.file_size, item.compress_size):
            raise ValueError(
                f"'{item.filename}' in the archive takes {item.compress_size} bytes, "
                f"and {item.file_size} once unpacked: no model shrinks like that."
            )


def hard_group(file: Any, path: str) -> Any:
    """Returns the group at a path of an `h5py.File`; None if the file itself has none.

    A link to a group of another file does not count.
    """
    import h5py

    group = file
    for name in path.split("/"):
        link = group.get(name, getlink=True) if name in group else None
        if not isinstance(link, h5py.HardLink):
            return None
        group = group[name]
        if not isinstance(group, h5py.Group):
            return None
    return group


def read_dataset(group: Any, path: str) -> NDArray[Any]:
    """Returns the array at a path below a group, if the file itself holds it."""
    import h5py
    import numpy as np

    parent, _, name = path.rpartition("/")
    owner = hard_group(group, parent) if parent else group
    link = owner.get(name, getlink=True) if owner is not None else None
    if link is None:
        raise ValueError(f"The file is damaged: it holds no dataset '{path}'.")
    dataset = owner[name] if isinstance(link, h5py.HardLink) else None
    if (
        not isinstance(dataset, h5py.Dataset)
        or dataset.external is not None
        or dataset.is_virtual
    ):
        raise ValueError(
            f"The file holds '{path}' as a group, or as a link to something else. "
            "Only arrays in the file itself are read."
        )
    size = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    stored = dataset.id.get_storage_size()
    if _is_bomb(size, stored):
        raise ValueError(
            f"The array '{path}' takes {stored} bytes in the file, and {size} once it "
            "is read: no state of an optimizer shrinks like that."
        )
    return np.asarray(dataset)


def read_datasets(group: Any, names: Iterable[str]) -> list[NDArray[Any]]:
    """Returns the arrays with these names in a group. Each may occur only once.

    Reading an array again for each of its names would fill the memory.
    """
    import h5py

    arrays, addresses = [], set()
    for name in names:
        arrays.append(read_dataset(group, name))
        address = h5py.h5o.get_info(group[name].id).addr
        if address in addresses:
            raise ValueError(
                f"The file is damaged: it holds one array as '{name}' and under an "
                "earlier name of its list, which holds each variable once."
            )
        addresses.add(address)
    return arrays


def read_names(attributes: Mapping[str, Any], name: str) -> list[str]:
    """Returns a list of strings, which Keras splits if it is too long for HDF5."""
    parts = [name] if name in attributes else _numbered(attributes, name)
    values = [attributes[part] for part in parts]
    are_lists = all(getattr(value, "ndim", 0) for value in values)
    names = [text(v) for value in values for v in value] if are_lists else []
    if not are_lists or not all(isinstance(v, str) for v in names):
        raise ValueError(
            f"The file is damaged: its `{name}` must be a list of strings. "
            f"Received: {values}"
        )
    return names


def _numbered(attributes, name):
    names = (f"{name}{i}" for i in itertools.count())
    return list(itertools.takewhile(attributes.__contains__, names))


def text(value: Any) -> Any:
    """Returns a string, which HDF5 may hold as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _is_bomb(size, stored):
    return size > _LARGE and size > _MOST_EXPANSION * stored
