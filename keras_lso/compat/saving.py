"""`deserialize` and `load_model`, which replace Keras's LossScaleOptimizer by ours."""

import functools
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

import keras

from keras_lso._core.checks import warn
from keras_lso._core.configs import adopt, read_optimizer
from keras_lso.compat.tf_keras import h5_models
from keras_lso.compat.tf_keras.configs import address_of
from keras_lso.compat.tf_keras.files import DAMAGE
from keras_lso.loss_scale_optimizer import DEFAULT_NAME

# RecursionError: a config can be nested too deeply.
_MISFITS = (*DAMAGE, RecursionError)
_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"


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
    # Keras imports h5py only when a file is read.
    import h5py

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
            return h5_models.load(filepath, load, compile, custom_objects)
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


def _adopted_copy(filepath, folder, custom_objects, compile):
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


def _read_config(archive):
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


def _was_wrapped_by_keras(archive, config):
    """Whether `compile` wrapped the optimizer, as under `mixed_float16`."""
    # The config then names the inner optimizer alone, but the state is a wrapper's.
    import h5py

    arguments = config
    for key in ("compile_config", "optimizer", "config"):
        arguments = arguments.get(key)
        if not isinstance(arguments, dict):
            return False
    if "inner_optimizer" in arguments or _WEIGHTS not in archive.namelist():
        return False
    with archive.open(_WEIGHTS) as file, h5py.File(file, "r") as weights:
        return "optimizer/inner_optimizer" in weights


def _copy_with_config(archive, path, config):
    with zipfile.ZipFile(path, "w") as copy:
        for item in archive.infolist():
            if item.filename == _CONFIG:
                copy.writestr(item, json.dumps(config))
            else:
                with archive.open(item) as source, copy.open(item, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
