"""`deserialize` and `load_model`, which replace Keras's LossScaleOptimizer by ours."""

import functools
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import keras
import numpy as np

from keras_lso._core.checks import warn
from keras_lso._core.configs import adopt, read_optimizer
from keras_lso._core.state_file import read_stored
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso._keras_internals.state import weights_kept_by
from keras_lso.compat.tf_keras_configs import address_of
from keras_lso.compat.tf_keras_files import DAMAGE, load_optimizer_state, names_in, text
from keras_lso.loss_scale_optimizer import DEFAULT_NAME, LossScaleOptimizer

# RecursionError: a config can be nested too deeply.
_MISFITS = (*DAMAGE, RecursionError)
_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
_METRICS = ("metrics", "weighted_metrics")
# The first of the trailing variables that belong to no state: see `StepCounters`.
_COUNTERS = ("amax_since_update", "consecutive_skips")


def deserialize(
    config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> keras.optimizers.Optimizer:
    """Returns the optimizer that a config dict describes.

    A `LossScaleOptimizer` in the config becomes a `keras_lso.LossScaleOptimizer`. Every
    backend reads configs that were written on PyTorch. `keras.optimizers.deserialize`
    finds classes by their bare names and does neither.

    Args:
        config: As `keras.optimizers.serialize` returns it.
        custom_objects: The classes that the config names. Defaults to `None`.

    Example:

    >>> import keras, keras_lso
    >>> theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    >>> ours = keras_lso.deserialize(keras.optimizers.serialize(theirs))
    >>> isinstance(ours, keras_lso.LossScaleOptimizer)
    True
    """
    if not isinstance(config, dict) or "class_name" not in config:
        raise ValueError(
            "`config` must be the dict that `keras.optimizers.serialize` returns. "
            f"Received: {config!r}"
        )
    optimizer = read_optimizer(config, custom_objects)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "`config` must describe an optimizer. It describes a "
            f"{type(optimizer).__name__}: {config!r}"
        )
    return optimizer


def load_model(
    filepath: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> keras.Model:
    """Loads a model whose optimizer may be Keras's, or saved by any backend.

    It works like `keras.saving.load_model`, except that

    - a `keras.optimizers.LossScaleOptimizer` in a `.keras` or `.h5` file becomes a
      `keras_lso.LossScaleOptimizer`, with its state;
    - a file that was written on PyTorch loads on every backend;
    - the optimizer in a `.h5` file keeps its state, which Keras loses, and trains on.

    Args:
        filepath: Path of a `.keras` or `.h5` file.
        custom_objects: The classes that the file names. Defaults to `None`.
        compile: Whether to compile the model as it was saved. Defaults to `True`.
        safe_mode: Whether to reject files that contain code. Defaults to `True`.
    """
    load = functools.partial(
        keras.saving.load_model, custom_objects=custom_objects, safe_mode=safe_mode
    )
    try:
        if zipfile.is_zipfile(filepath):
            with tempfile.TemporaryDirectory() as folder:
                copy = _adopted_copy(filepath, folder, custom_objects, compile)
                return load(copy, compile=compile)
        # The endings are those by which Keras recognises such a file.
        if str(filepath).endswith((".h5", ".hdf5")) and h5py.is_hdf5(filepath):
            return _load_h5(filepath, load, compile, custom_objects)
    except _MISFITS as error:
        # The file does not cause errors of the disk or of a device.
        is_of_disk = isinstance(error, OSError) and error.errno is not None
        is_of_device = isinstance(error, RuntimeError) and type(error) not in _MISFITS
        if is_of_disk or is_of_device:
            raise
        raise ValueError(
            "The file could not be loaded: it is damaged, or its config does not fit "
            f"the classes that it names ({type(error).__name__}: {error}). If tf.keras "
            "2 wrote it, build the model in code, and call `model.load_weights(path)` "
            "and `keras_lso.mixed_precision.load_optimizer_state(optimizer, path)`. "
            f"Received: filepath={filepath!r}"
        ) from error
    model = load(filepath, compile=compile)
    optimizer = getattr(model, "optimizer", None)
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        warn(
            "Only in a `.keras` or `.h5` file is Keras's LossScaleOptimizer replaced "
            "by ours. Compile the model with a `keras_lso.LossScaleOptimizer`, or save "
            f"it as `.keras` first. Received: filepath={filepath!r}"
        )
    return model


def _adopted_copy(
    filepath: str | os.PathLike[str],
    folder: str,
    custom_objects: Mapping[str, Any] | None,
    compile: bool,
) -> str | os.PathLike[str]:
    """Returns the path of a copy whose classes are ours, or `filepath` if they are."""
    with zipfile.ZipFile(filepath) as archive:
        config = _read_config(archive)
        if not compile:
            # A model that is not compiled loads even if its optimizer is damaged.
            config["compile_config"] = None
        adopted = adopt(config, custom_objects)
        if _was_wrapped_by_keras(archive, adopted):
            inner = adopted["compile_config"]["optimizer"]
            arguments = {"name": DEFAULT_NAME, "inner_optimizer": inner}
            address = address_of("LossScaleOptimizer")
            adopted["compile_config"]["optimizer"] = {**address, "config": arguments}
        if adopted == config:
            return filepath
        path = os.path.join(folder, "model.keras")
        _copy_with_config(archive, path, adopted)
        return path


def _read_config(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Returns the config of the model in a `.keras` file."""
    try:
        config = json.loads(archive.read(_CONFIG))
        if not isinstance(config, dict):
            raise ValueError(f"it is a {type(config).__name__}")
    # RuntimeError: the member is encrypted, or compressed by an unknown method.
    except (KeyError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The archive holds no `{_CONFIG}` that can be read, a dict ({error}): it "
            "is no `.keras` file of Keras 3, or it is damaged."
        ) from error
    return config


def _was_wrapped_by_keras(archive: zipfile.ZipFile, config: dict[str, Any]) -> bool:
    """Whether `compile` wrapped the optimizer, as under `mixed_float16`."""
    # The config then names the inner optimizer alone, but the state is a wrapper's.
    arguments: Any = config
    for key in ("compile_config", "optimizer", "config"):
        arguments = arguments.get(key)
        if not isinstance(arguments, dict):
            return False
    if "inner_optimizer" in arguments or _WEIGHTS not in archive.namelist():
        return False
    with archive.open(_WEIGHTS) as file, h5py.File(file, "r") as weights:
        return "optimizer/inner_optimizer" in weights


def _copy_with_config(
    archive: zipfile.ZipFile, path: str, config: dict[str, Any]
) -> None:
    """Writes a copy of an archive with another config."""
    with zipfile.ZipFile(path, "w") as copy:
        for item in archive.infolist():
            if item.filename == _CONFIG:
                copy.writestr(item, json.dumps(config))
            else:
                with archive.open(item) as source, copy.open(item, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)


# --- HDF5 files: Keras loses the state of their optimizers ---------------------------


def _load_h5(
    path: str | os.PathLike[str],
    load: Callable[..., keras.Model],
    compile: bool,
    custom_objects: Mapping[str, Any] | None,
) -> keras.Model:
    """Loads a model by `load`, compiles it, and restores its optimizer."""
    saved = _read_training(path) if compile else None
    if saved is None:
        return load(path, compile=compile)
    config, names, values = saved
    model = load(path, compile=False)
    losses = [config.get(name) for name in ("loss", *_METRICS)]
    # Names of losses and metrics are the same in tf.keras 2, their configs are not.
    if values is None and '"class_name"' in json.dumps(losses):
        warn(
            "The model is not compiled: the losses and metrics in a file of tf.keras 2 "
            "are not those of Keras 3. Compile it, call "
            "`model.optimizer.build(model.trainable_variables)`, and then "
            "`keras_lso.mixed_precision.load_optimizer_state(model.optimizer, path)`. "
            f"Received: filepath={path!r}"
        )
        return model
    with keras.saving.custom_object_scope(custom_objects or {}):
        # If `compile` had wrapped the optimizer, the file would hold the wrapper.
        model.compile(
            optimizer=read_optimizer(config["optimizer_config"], custom_objects),
            loss=_objects(config.get("loss"), keras.losses.deserialize),
            loss_weights=config.get("loss_weights"),
            **{n: _objects(config.get(n), keras.metrics.deserialize) for n in _METRICS},
            auto_scale_loss=False,
        )
    optimizer, trained = model.optimizer, model.trainable_variables
    if values:
        _restore(optimizer, trained, names, values)
    if model.built:
        # Otherwise its first step builds the optimizer, for the variables at that time.
        optimizer.build(trained)
        if values is None and names:
            try:
                load_optimizer_state(optimizer, path)
            except ValueError as error:
                warn(f"Optimizer '{optimizer.name}' begins with a new state: {error}")
    return model


def _read_training(path: str | os.PathLike[str]) -> tuple[Any, ...] | None:
    """Returns the config of `compile`, and the names and values of variables."""
    # None if the model was not compiled. No values if tf.keras 2 wrote the file.
    with h5py.File(path, "r") as file:
        if not {"model_config", "training_config"} <= file.attrs.keys():
            return None
        try:
            config = json.loads(text(file.attrs["training_config"]))
            if not isinstance(config["optimizer_config"], dict):
                raise TypeError("`optimizer_config` is no dict")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "The `training_config` in a `.h5` file must be JSON, a dict with a "
                f"dict as its `optimizer_config`. In this file it is not ({error}): "
                "the file is damaged."
            ) from error
        group = file.get("optimizer_weights")
        if group is None:
            return config, [], []
        is_of_keras_3 = str(text(file.attrs.get("keras_version"))).startswith("3")
        names = names_in(group)
        values = [_read(group[name]) for name in names] if is_of_keras_3 else None
        return config, names, values


def _read(dataset: h5py.Dataset) -> np.ndarray:
    """Returns the array in a dataset."""
    array = np.asarray(dataset[()])
    # Keras writes bfloat16 as bytes without a type.
    return array.view("bfloat16") if array.dtype == "V2" else array


def _objects(config: Any, deserialize: Callable[[Any], Any]) -> Any:
    """Replaces the losses or metrics in a nested config by their objects."""
    if isinstance(config, list):
        return [_objects(item, deserialize) for item in config]
    if isinstance(config, str):
        registered = keras.saving.get_registered_object(config)
        return config if registered is None else registered
    if not isinstance(config, dict):
        return config
    if "class_name" in config:
        return deserialize(config)
    return {key: _objects(item, deserialize) for key, item in config.items()}


def _restore(
    optimizer: keras.optimizers.Optimizer,
    trained: list[keras.Variable],
    names: list[str],
    values: list[np.ndarray],
) -> None:
    """Loads the values of an optimizer's variables, after it is built if need be."""
    ends = [name.rpartition("/")[2] for name in names]
    count = next((i for i, end in enumerate(ends) if end in _COUNTERS), len(ends))
    scalers = [o for o in chain_of(optimizer) if isinstance(o, LossScaleOptimizer)]
    saved = scalers[0]._state.variables if scalers else optimizer.variables
    if count > len(saved):
        # Otherwise it was not built when it was saved, or has no slots.
        optimizer.build(trained)
    store = {str(i): value for i, value in enumerate(values[:count])}
    if scalers:
        scalers[0]._state.load(store, is_as_in_memory=count < len(values))
        return
    # Such a file holds `variables`, whatever `save_own_variables` writes.
    variables = list(optimizer.variables)
    if len(store) != len(variables):
        warn(
            f"Optimizer '{optimizer.name}' begins with a new state: the file holds "
            f"{len(store)} variables for it, and it has {len(variables)}. If layers "
            "were frozen or unfrozen after the optimizer was built, build a new one "
            "for the variables that it was built for, and assign to its `variables`."
        )
        return
    for variable, value in read_stored(variables, store, weights_kept_by(optimizer)):
        variable.assign(value)
