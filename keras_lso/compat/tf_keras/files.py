"""`load_optimizer_state`: the state in the `.h5` and `.keras` files of tf.keras 2."""

import itertools
import json
import os
import struct
import zipfile
import zlib
from typing import Any

import h5py
import keras

from keras_lso._core.checks import warn
from keras_lso._core.wrapper import check_optimizer
from keras_lso._keras_internals.optimizers import chain_of, variables_of
from keras_lso.compat.tf_keras.state import (
    SavedState,
    layout_of,
    split_name,
    values_for,
)
from keras_lso.loss_scale_optimizer import LossScaleOptimizer

# The errors of h5py, json and zipfile for a damaged file, other than ValueError.
DAMAGE = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_NO_STATE = (
    "The file holds no optimizer state. tf.keras writes it only if the model is "
    "compiled, has trained, and is saved as a whole, with `include_optimizer=True`. It "
    "never writes that of `tf.keras.optimizers.legacy` into a `.keras` file."
)


def load_optimizer_state(
    optimizer: keras.optimizers.Optimizer, path: str | os.PathLike[str]
) -> None:
    """Loads the optimizer state in a file of tf.keras 2 into a Keras 3 optimizer.

    Training resumes: iterations, slots and learning rate come from the file. The
    `optimizer` keeps its own hyperparameters, and a schedule if it has one. A
    `LossScaleOptimizer` starts a new loss scale, since no file holds it. "Coming from
    tf.keras 2" lists the files with a state, and formulas that Keras 3 changed.

    Slots are matched to variables by the names of the layer and the variable; layers
    that Keras numbered, and all layers of a `.keras` file, which holds no names, by
    their order. Build the same model, and build the optimizer with the model's
    `trainable_variables`. An order that contradicts names or shapes raises an error.

    Args:
        optimizer: Built optimizer of the saved class, in a `LossScaleOptimizer` or not.
        path: Path of a `.h5` or `.keras` file that `model.save` of tf.keras wrote.

    Raises:
        FileNotFoundError: If there is nothing at `path`.
        ValueError: If the file is damaged, or holds no optimizer state, or one whose
            slots, counts or shapes do not fit `optimizer`. Nothing is loaded then.

    Example:

    ```python
    model.load_weights("model.h5")
    optimizer.build(model.trainable_variables)
    load_optimizer_state(optimizer, "model.h5")
    ```
    """
    check_optimizer(optimizer, "optimizer")
    if not all(o.built for o in chain_of(optimizer)):
        raise ValueError(
            "The optimizer must be built before its state can be loaded. Call "
            "`optimizer.build(model.trainable_variables)` first."
        )
    innermost = chain_of(optimizer)[-1]
    path = os.path.expanduser(os.fspath(path))
    if not os.path.exists(path) and not os.path.isfile(f"{path}.index"):
        raise FileNotFoundError(f"There is no file at path={path!r}.")
    try:
        state = _read(path, innermost)
        pairs = values_for(innermost, state)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} Nothing was loaded. Received: {path=}") from error
    except DAMAGE as error:
        raise ValueError(
            f"The file is damaged ({type(error).__name__}: {error}). Nothing was "
            f"loaded. Received: {path=}"
        ) from error
    _assign(optimizer, pairs)
    decay = state.config.get("decay")
    has_number = isinstance(innermost.learning_rate, keras.Variable)
    # Nadam's `decay` is the decay of its momentum.
    if decay and has_number and not isinstance(innermost, keras.optimizers.Nadam):
        warn(
            f"The learning rate in the file decays (decay={decay}), and that of a "
            "Keras 3 optimizer is constant. Give the optimizer `keras.optimizers."
            f"schedules.InverseTimeDecay(learning_rate, 1, {decay})`."
        )


def _assign(optimizer, pairs):
    """Assigns the checked values; and re-initialises the loss scale, with a warning."""
    wrapper = keras.optimizers.LossScaleOptimizer
    scaler: Any = next((o for o in chain_of(optimizer) if isinstance(o, wrapper)), None)
    if isinstance(scaler, LossScaleOptimizer):
        scaler._state.assign(*zip(*pairs, strict=True))
    else:
        if scaler is not None:
            pairs += [(scaler.dynamic_scale, scaler.initial_scale)]
            pairs += [(scaler.step_counter, 0)]
        for variable, value in pairs:
            variable.assign(value)
    # Keras's class has no fixed scale.
    if scaler is not None and getattr(scaler, "dynamic", True):
        warn(
            "The file holds no loss scale: that of the optimizer starts at "
            f"initial_scale={scaler.initial_scale}."
        )


def _read(path, optimizer):
    if os.path.isdir(path) or os.path.isfile(path.removesuffix(".index") + ".index"):
        raise ValueError(
            "SavedModels and checkpoints of TensorFlow are not read. Load the weights "
            "in tf.keras, `model.load_weights(...)`, build the optimizer, and write "
            "`model.save('model.h5')`."
        )
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive, optimizer)
    if h5py.is_hdf5(path):
        with h5py.File(path, "r") as file:
            return _read_h5(file, optimizer)
    raise ValueError(
        "The file is neither an HDF5 file nor a `.keras` file, or it is damaged."
    )


def _read_archive(archive, optimizer):
    _refuse_keras_3(json.loads(archive.read("metadata.json")).get("keras_version"))
    config = json.loads(archive.read("config.json"))
    saved = _unwrap((config.get("compile_config") or {}).get("optimizer"))
    for name in {"model.weights.h5", "variables.h5"} & set(archive.namelist()):
        with archive.open(name) as stored, h5py.File(stored, "r") as file:
            if "optimizer/vars" in file:
                return _from_numbered(file["optimizer/vars"], optimizer, saved)
    raise ValueError(_NO_STATE)


def _read_h5(file, optimizer):
    """Reads a whole model, or a file of `save_weights("....weights.h5")`."""
    _refuse_keras_3(text(file.attrs.get("keras_version")))
    if "optimizer/vars" in file:
        return _from_numbered(file["optimizer/vars"], optimizer, {})
    if "optimizer_weights" not in file:
        raise ValueError(_NO_STATE)
    config = json.loads(text(file.attrs.get("training_config")) or "{}")
    state = SavedState(_unwrap(config.get("optimizer_config")))
    group = file["optimizer_weights"]
    arrays = {name.removesuffix(":0"): group[name][()] for name in names_in(group)}
    # Classes of TF 2.11 and newer call it `iteration`.
    is_legacy = any(name.split("/")[-1] == "iter" for name in arrays)
    for name, value in arrays.items():
        last = name.split("/")[-1]
        if last in ("iter", "iteration"):
            state.iterations = value
        elif last == "momentum_cache":
            state.u_product = value
        else:
            slot, variable = split_name(name, optimizer, is_legacy)
            state.slots.setdefault(slot, []).append((variable, value))
    if state.iterations is None:
        raise ValueError(_NO_STATE)
    return state


def _from_numbered(group, optimizer, saved):
    """Returns the state in a group of arrays, numbered as tf.keras created them."""
    layout = layout_of(optimizer, saved.get("config"))
    iterations, *values = [group[str(i)][()] for i in range(len(group))]
    state = SavedState(saved, iterations)
    width, count = sum(map(len, layout)), len(variables_of(optimizer))
    if not saved and len(values) == width * count + 1:
        _refuse_keras_3("3, it seems")
    if values and len(values) != width * count:
        raise ValueError(
            f"The file holds {len(values)} slot variables, but {width} for each of "
            f"the {count} variables that the optimizer was built for make "
            f"{width * count}. Slots: {list(itertools.chain(*layout))}. If the "
            "optimizer is right, save the model as `.h5`, with the names of the slots."
        )
    rest = iter(values)
    for slots in layout if values else []:
        for _, slot in itertools.product(range(count), slots):
            state.slots.setdefault(slot, []).append((None, next(rest)))
    return state


def _unwrap(saved):
    """Returns the config dict of the innermost optimizer; {} if there is none."""
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        return {}
    # Before TF 2.4 the key was `optimizer`.
    inner = saved["config"].get("inner_optimizer") or saved["config"].get("optimizer")
    return _unwrap(inner) if isinstance(inner, dict) else saved


def _refuse_keras_3(version):
    if str(version).startswith("3"):
        raise ValueError(
            f"The file was written by Keras {version}, not by tf.keras 2. Call "
            "`keras_lso.load_model(path)`, which loads the optimizer with the model."
        )


def names_in(group: Any) -> list[str]:
    """Returns the names of the variables in a group of a whole model in HDF5."""
    parts = (
        ["weight_names"]  # Keras splits a list that is too long for HDF5.
        if "weight_names" in group.attrs
        else [f"weight_names{i}" for i in range(len(group.attrs))]
    )
    return [text(name) for part in parts for name in group.attrs[part]]


def text(value: Any) -> Any:
    """Returns a string, which HDF5 may hold as bytes."""
    return value.decode() if isinstance(value, bytes) else value
