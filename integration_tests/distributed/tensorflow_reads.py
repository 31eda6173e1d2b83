"""What a user reads, saves and loads after `fit`, in one replica or several."""

import re
import warnings

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import keras_lso
from integration_tests.distributed import tensorflow_fit
from integration_tests.distributed.tensorflow_one_device import scope_of


def fit_and_read(folder, strategy):
    """Fits a model that some batches overflow; returns what can be read afterwards.

    Args:
        folder: String. Where files go.
        strategy: A `tf.distribute.Strategy`, or None.

    Returns:
        Dict that JSON can hold; the same whatever the strategy, but for rounding in
        `"val_loss"` and `"norms"`.
    """
    model = _make_model(strategy, initial_scale=2.0**10)
    optimizer = model.optimizer
    history = _fit(
        model,
        keras_lso.callbacks.LossScaleMonitor(log_dir=f"{folder}/logs", patience=2),
        keras_lso.callbacks.SwapEMAWeights(swap_on_epoch=True),
    )
    found = {
        "loss_scale": history["loss_scale"],
        "skipped_steps": history["skipped_steps"],
        "val_loss": history["val_loss"],
        "events": _read_events(f"{folder}/logs"),
        "after fit": values_of(optimizer),
    }
    with scope_of(strategy):
        found["in the scope"] = values_of(optimizer)
    found["set_weights"] = _set_weights_changes_nothing(optimizer)
    found["load_model"] = _is_loaded(model, f"{folder}/model.keras", strategy)
    optimizer.record_overflows()
    model.make_train_function(force=True)
    _fit(model, last_overflows=True)
    overflowed = {id(v) for v in optimizer.overflowed_variables()}
    found["overflowed"] = [id(v) in overflowed for v in model.trainable_variables]
    found["last_step_applied"] = bool(optimizer.last_step_applied)
    found["replicas agree"] = strategy is None or all(
        len({v.numpy().tobytes() for v in strategy.experimental_local_results(w.value)})
        == 1
        for w in [*model.variables, *optimizer.variables]
    )
    found["stalled"] = _stall(strategy)
    found["record"], found["norms"] = _record(strategy)
    return found


def values_of(optimizer):
    """Returns what an optimizer says about itself, as plain values."""
    optimizer.check_stalled()
    return {
        "loss_scale": float(optimizer.loss_scale),
        "skipped_steps": int(optimizer.skipped_steps),
        "last_step_applied": bool(optimizer.last_step_applied),
        "dynamic_counter": int(optimizer.dynamic_counter),
        "iterations": int(optimizer.iterations.numpy()),
        "learning_rate": float(optimizer.learning_rate.numpy()),
        "scaled": float(optimizer.scale_loss(2.0)),
        "policy": float(optimizer.loss_scale_policy()),
        "config": optimizer.get_config(),
        "weights": [list(np.shape(w)) for w in optimizer.get_weights()],
        "variables": len(optimizer.variables),
        "variables()": len(optimizer.variables()),
    }


def _make_model(strategy, initial_scale):
    def wrapper(inner, **ours):
        inner.use_ema = True
        ours["initial_scale"] = initial_scale
        return keras_lso.LossScaleOptimizer(inner, **ours)

    with scope_of(strategy):
        return tensorflow_fit.make_model(wrapper)


def _read_events(folder):
    events = EventAccumulator(folder).Reload()
    return {
        tag: [
            [event.step, float(tensor_util.make_ndarray(event.tensor_proto))]
            for event in events.Tensors(tag)
        ]
        for tag in ("loss_scale", "skipped_steps")
    }


def _fit(model, *callbacks, last_overflows=False):
    overflows = {tensorflow_fit.BATCHES - 1: [0]}
    x, y = tensorflow_fit.make_data(
        overflows if last_overflows else tensorflow_fit.OVERFLOWS
    )
    history = model.fit(
        x,
        y,
        batch_size=tensorflow_fit.BATCH_SIZE,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        validation_data=tensorflow_fit.make_data({}),
    )
    return history.history


def _bits(variables):
    return [v.numpy().tobytes() for v in variables]


def _set_weights_changes_nothing(optimizer):
    before = _bits(optimizer.variables)
    optimizer.set_weights(optimizer.get_weights())
    return _bits(optimizer.variables) == before


def _is_loaded(model, path, strategy):
    model.save(path)
    with scope_of(strategy):
        loaded = keras_lso.load_model(path)
    same_reads = values_of(loaded.optimizer) == values_of(model.optimizer)
    return same_reads and _bits(loaded.variables) == _bits(model.variables)


def _stall(strategy):
    """Returns the words of the warning, where one scale above the lowest overflows."""
    model = _make_model(strategy, initial_scale=2.0**-13)
    x = np.full((tensorflow_fit.BATCHES * tensorflow_fit.BATCH_SIZE, 4), np.inf, "f4")
    monitor = keras_lso.callbacks.LossScaleMonitor(patience=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(
            x,
            x[:, :1],
            batch_size=tensorflow_fit.BATCH_SIZE,
            verbose=0,
            callbacks=[monitor],
        )
    [message] = [str(w.message) for w in caught if "has stalled" in str(w.message)]
    # Keras numbers the layers through.
    return re.sub(r"_\d+", "", message).split()


def _record(strategy):
    """Returns what a `StepRecord` has of each step, and the norms, with the logged."""
    model = _make_model(strategy, initial_scale=2.0**10)
    history = _fit(model, keras_lso.callbacks.StepRecord())
    records = history["step_record"]
    columns = ("step", "outcome", "loss_scale", "learning_rate")
    steps = [[record[name] for name in columns] for record in records]
    norms = np.concatenate([record["gradient_norm"] for record in records])
    logged = history["gradient_norm_median"] + history["gradient_norm_max"]
    return steps, norms[np.isfinite(norms)].tolist() + logged
