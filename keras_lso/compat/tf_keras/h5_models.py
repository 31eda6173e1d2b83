"""Whole models in HDF5 files: Keras loses the state of their optimizers."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras

from keras_lso._core.checks import warn
from keras_lso._core.configs import read_optimizer
from keras_lso._core.state_file import read_stored
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso.compat.tf_keras.files import (
    arrays_in,
    load_optimizer_state,
    names_in,
    text,
)
from keras_lso.loss_scale_optimizer import LossScaleOptimizer

_ENDINGS = (".h5", ".hdf5")  # The endings by which Keras recognises such a file.


class SavedTraining(NamedTuple):
    """How the model in a file was compiled, and the state of its optimizer."""

    config: dict[str, Any]
    """The arguments of `compile` and the optimizer's config."""

    names: list[str]
    """The paths of the optimizer's variables."""

    values: list[Any] | None
    """An array for each of them; None if tf.keras 2 wrote the file."""


def is_h5(path: str | os.PathLike[str]) -> bool:
    """Whether Keras takes a file for a whole model in HDF5."""
    import h5py

    is_file = str(path).endswith(_ENDINGS) and os.path.isfile(path)
    return is_file and h5py.is_hdf5(path)


def load(
    path: str | os.PathLike[str],
    load_model: Callable[..., Any],
    compile: bool,
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Loads a model by `load_model`, compiles it, and restores its optimizer."""
    saved = _read_training(path) if compile else None
    if saved is None:
        return load_model(path, compile=compile)
    model = load_model(path, compile=False)
    _restore_training(model, saved, path, custom_objects)
    return model


def _read_training(path):
    """Returns the `SavedTraining` in a file; None if there is none."""
    import h5py

    with h5py.File(path, "r") as file:
        if not {"model_config", "training_config"} <= file.attrs.keys():
            return None
        try:
            config = json.loads(text(file.attrs["training_config"]))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The `training_config` in the file cannot be read ({error}): the file "
                "is damaged."
            ) from error
        if not isinstance(config, dict) or not isinstance(
            config.get("optimizer_config"), dict
        ):
            raise ValueError(
                "The `training_config` in a `.h5` file must be a dict that holds the "
                f"`optimizer_config`, a dict. Received: {config!r}"
            )
        group = file.get("optimizer_weights")
        if group is None:
            return SavedTraining(config, [], [])
        is_of_keras_3 = str(text(file.attrs.get("keras_version"))).startswith("3")
        values = arrays_in(group) if is_of_keras_3 else None
        return SavedTraining(config, names_in(group), values)


def _restore_training(model, saved, path, custom_objects):
    if saved.values is None and not _has_names_only(saved.config):
        warn(
            "The model is not compiled: the losses and metrics in a file of tf.keras 2 "
            "are not those of Keras 3. Compile it, call "
            "`model.optimizer.build(model.trainable_variables)`, and then "
            "`keras_lso.mixed_precision.load_optimizer_state(model.optimizer, path)`. "
            f"Received: filepath={path!r}"
        )
        return
    with keras.saving.custom_object_scope(custom_objects or {}):
        # If `compile` had wrapped the optimizer, the file would hold the wrapper.
        model.compile(**_arguments(saved.config, custom_objects), auto_scale_loss=False)
    optimizer, trained = model.optimizer, model.trainable_variables
    if saved.values:
        _restore(optimizer, trained, saved)
    if not model.built:
        # The model's first step builds the optimizer, for the variables at that time.
        return
    optimizer.build(trained)
    if saved.values is None and saved.names:
        _load_as_of_tf_keras(optimizer, path)


# --- The arguments of `compile` -----------------------------------------------

_METRICS = ("metrics", "weighted_metrics")


def _has_names_only(config):
    """Whether losses and metrics are strings, alone or in lists and dicts."""
    parts = [config.get(name) for name in ("loss", *_METRICS)]
    return '"class_name"' not in json.dumps(parts)


def _arguments(config, custom_objects):
    optimizer = config.get("optimizer_config")
    metrics = {
        name: _objects(config.get(name), keras.metrics.deserialize) for name in _METRICS
    }
    return {
        "optimizer": read_optimizer(optimizer, custom_objects),
        "loss": _objects(config.get("loss"), keras.losses.deserialize),
        "loss_weights": config.get("loss_weights"),
        **metrics,
    }


def _objects(config, deserialize):
    """Replaces the losses or metrics in a nested config by their objects."""
    if isinstance(config, list):
        return [_objects(item, deserialize) for item in config]
    if isinstance(config, str):
        own = keras.saving.get_registered_object(config)
        return config if own is None else own
    if not isinstance(config, dict):
        return config
    if "class_name" in config:
        return deserialize(config)
    return {key: _objects(item, deserialize) for key, item in config.items()}


# --- The state of the optimizer -----------------------------------------------


def _restore(optimizer, trained, saved):
    scaler = next(
        (o for o in chain_of(optimizer) if isinstance(o, LossScaleOptimizer)), None
    )
    unsaved = _unsaved(saved.names)
    values = saved.values[: len(saved.values) - unsaved]
    kept = optimizer.variables if scaler is None else scaler._state.variables
    if len(values) > len(kept):
        # Otherwise it was not built when it was saved, or has no slots.
        optimizer.build(trained)
    if scaler is None:
        _assign(optimizer, values)
    else:
        store = {str(i): value for i, value in enumerate(values)}
        scaler._state.load(store, is_as_in_memory=unsaved > 0)


def _unsaved(names):
    """Returns the number of trailing variables that belong to no state."""
    ends = [name.rpartition("/")[2] for name in names]
    if "consecutive_skips" not in ends:
        return 0
    count = 1 + ends[::-1].index("consecutive_skips")
    return count + ("amax_since_update" in ends[-count - 1 : -count])


def _assign(optimizer, values):
    # Such a file holds `variables`, whatever `save_own_variables` writes.
    variables = list(optimizer.variables)
    if len(values) != len(variables):
        warn(
            f"The optimizer '{optimizer.name}' begins with a new state: the file holds "
            f"{len(values)} variables for it, and it has {len(variables)}. If layers "
            "were frozen or unfrozen after the optimizer was built, build a new one "
            "for the variables that it was built for, and assign to its `variables`."
        )
        return
    stored = {str(i): v for i, v in enumerate(values)}
    for variable, value in read_stored(variables, stored):
        variable.assign(value)


def _load_as_of_tf_keras(optimizer, path):
    try:
        load_optimizer_state(optimizer, path)
    except ValueError as error:
        warn(f"The optimizer '{optimizer.name}' begins with a new state: {error}")
