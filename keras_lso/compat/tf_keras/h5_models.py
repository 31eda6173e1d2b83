"""Whole models in HDF5 files: Keras loses the state of their optimizers."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_lso._core.checks import warn
from keras_lso._core.configs import read_optimizer
from keras_lso._core.state_file import read_stored
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso.compat.tf_keras.files import load_optimizer_state, names_in, text
from keras_lso.loss_scale_optimizer import LossScaleOptimizer

_METRICS = ("metrics", "weighted_metrics")
# The first of the trailing variables that belong to no state: see `StepCounters`.
_COUNTERS = ("amax_since_update", "consecutive_skips")


def load(
    path: str | os.PathLike[str],
    load_model: Callable[..., Any],
    compile: bool,
    custom_objects: Mapping[str, Any] | None,
) -> Any:
    """Loads a model by `load_model`, compiles it, and restores its optimizer."""
    saved = _read_training(path) if compile else None
    if saved is None:
        return load_model(path, compile=compile)
    config, names, values = saved
    model = load_model(path, compile=False)
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


def _read_training(path):
    """Returns the config of `compile`, and the names and values of variables."""
    # None if the model was not compiled. No values if tf.keras 2 wrote the file.
    import h5py

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


def _read(dataset):
    """Returns the array in a dataset."""
    array = np.asarray(dataset[()])
    # Keras writes bfloat16 as bytes without a type.
    return array.view("bfloat16") if array.dtype == "V2" else array


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


def _restore(optimizer, trained, names, values):
    ends = [name.rpartition("/")[2] for name in names]
    count = next((i for i, end in enumerate(ends) if end in _COUNTERS), len(ends))
    scalers = [o for o in chain_of(optimizer) if isinstance(o, LossScaleOptimizer)]
    kept = scalers[0]._state.variables if scalers else optimizer.variables
    if count > len(kept):
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
    for variable, value in read_stored(variables, store):
        variable.assign(value)
