"""Reads the contents of a saved file without constructing a model: `keras-lso show`.

This reads the JSON configs, the shapes of the arrays, and the optimizer's arrays that
hold one number. It imports no class, and constructs nothing from a config.
`saved_optimizers.py` reads the optimizer's part.
"""

import json
import os
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from keras_lso.compat.saved_optimizers import SavedOptimizer, of_model, of_weights
from keras_lso.compat.saving import WEIGHTS, read_config
from keras_lso.compat.untrusted_files import (
    DAMAGE,
    datasets_in,
    hard_group,
    refuse_bombs,
    text,
)

_MISFITS = (*DAMAGE, MemoryError, RecursionError, TypeError, ValueError)
# The groups in the root of a file that `save_weights` has written.
_OF_WEIGHTS = ("_layer_checkpoint_dependencies", "layers", "optimizer", "vars")


@dataclass
class SavedFile:
    """The contents of a saved file.

    Attributes:
        path: String, the path of the file.
        kind: String: "model", "model in HDF5" or "weights".
        model: String, the class of the model. None for a file of weights.
        dtype_policies: Dict of the names of dtype policies to the number of layers that
            have them. None for a file of weights, which does not name the layers.
        weights: Dict of the dtypes of the weights to their `number` and `bytes`.
        optimizer: `SavedOptimizer`. None if there is none.
    """

    path: str
    kind: str
    model: str | None = None
    dtype_policies: dict[str, int] | None = None
    weights: dict[str, dict[str, int]] = field(default_factory=dict)
    optimizer: SavedOptimizer | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as a dict, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        from keras_lso.compat.saved_files_table import text_of_file

        return text_of_file(self)


def contents_of(path: str | os.PathLike[str]) -> SavedFile:
    """Returns the contents of a `.keras`, `.h5` or `.weights.h5` file.

    Args:
        path: String or path of the file.

    Raises:
        OSError: If the file cannot be opened.
        ValueError: If the file has another format, is damaged, or would fill the
            memory.
    """
    path = os.fspath(path)
    with open(path, "rb"):  # Its `OSError` says what is wrong.
        pass
    try:
        if zipfile.is_zipfile(path):
            return _of_archive(path)
        return _of_hdf5(path)
    except _MISFITS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"The file cannot be read. Received: {path!r}, and the error: {kind}{error}"
        ) from error


def _of_archive(path):
    import h5py

    with zipfile.ZipFile(path) as archive:
        refuse_bombs(archive)
        config = read_config(archive)
        found = SavedFile(path, "model", *_of_config(config))
        compiled = config.get("compile_config")
        compiled = compiled if isinstance(compiled, dict) else {}
        if WEIGHTS not in archive.namelist():
            found.optimizer = of_weights(None, compiled.get("optimizer"))
            return found
        with archive.open(WEIGHTS) as member, h5py.File(member, "r") as file:
            found.weights = _weights_in(file, "optimizer/")
            found.optimizer = of_weights(file, compiled.get("optimizer"))
    return found


def _of_hdf5(path):
    import h5py

    if not h5py.is_hdf5(path):
        raise ValueError("The file is neither a `.keras` file nor an HDF5 file.")
    with h5py.File(path, "r") as file:
        if "model_config" in file.attrs:
            config = json.loads(text(file.attrs["model_config"]))
            compiled = {}
            if "training_config" in file.attrs:
                compiled = json.loads(text(file.attrs["training_config"]))
            found = SavedFile(path, "model in HDF5", *_of_config(config))
            found.weights = _weights_in(file, "optimizer_weights/")
            found.optimizer = of_model(file, compiled.get("optimizer_config"))
            return found
        if not any(hard_group(file, name) is not None for name in _OF_WEIGHTS):
            raise ValueError("The file holds neither a Keras model nor Keras weights.")
        weights = _weights_in(file, "optimizer/")
        return SavedFile(
            path, "weights", weights=weights, optimizer=of_weights(file, None)
        )


def _of_config(config):
    """Returns the class of a model, and the number of layers by dtype policy."""
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        raise ValueError("The config of the model is damaged: it is not a dict.")
    policies: Counter = Counter()
    # A loop, since a deeply nested config would exceed the recursion limit.
    ahead: list = [config["config"]]
    while ahead:
        item = ahead.pop()
        if isinstance(item, list):
            ahead += item
        elif isinstance(item, dict):
            name = _dtype_policy(item)
            if name is not None:
                policies[name] += 1
            ahead += item.values()
    return str(config.get("class_name")), dict(sorted(policies.items()))


def _dtype_policy(config):
    """Returns the name of the dtype policy of a layer; None for anything else."""
    arguments = config.get("config")
    if not isinstance(arguments, dict) or not config.get("class_name"):
        return None
    # An input has a dtype but computes nothing. Only layers can be trainable.
    if config["class_name"] == "InputLayer" or "trainable" not in arguments:
        return None
    policy = arguments.get("dtype")
    if isinstance(policy, dict):
        inner = policy.get("config")
        name = inner.get("name") if isinstance(inner, dict) else None
        return str(name or policy.get("class_name"))
    return policy if isinstance(policy, str) else None


def _weights_in(file, optimizer):
    """Returns the number and the bytes of the weights, by dtype."""
    found: dict[str, dict[str, int]] = {}
    for name, dataset in datasets_in(file).items():
        if name.startswith(optimizer):
            continue
        dtype = dataset.dtype.name
        if dataset.dtype.kind == "V":  # HDF5 has no bfloat16; Keras stores its name.
            dtype = str(text(dataset.attrs.get("dtype", "bfloat16")))
        counts = found.setdefault(dtype, {"number": 0, "bytes": 0})
        counts["number"] += 1
        counts["bytes"] += dataset.size * dataset.dtype.itemsize
    return found
