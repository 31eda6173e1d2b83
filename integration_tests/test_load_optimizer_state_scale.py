"""`load_optimizer_state` loads the loss scale and the count of good steps."""

import json
import warnings

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.loaded_states import (
    STEPS,
    assert_close_weights,
    assert_same_slots,
    built,
    copy_weights,
    make_ours,
    places,
    train,
    twin,
)
from integration_tests.twin_models import dense, nested, sequential
from keras_lso.mixed_precision import load_optimizer_state

# Keras's own, where it writes one.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")

WITH_SCALE = {"saved_model", "weights", "checkpoint", "checkpoint_folder"}


@pytest.fixture
def wrapped(theirs):
    """An Adam that was saved in its wrapper, and a model with its weights."""

    def get(save, legacy=False, **options):
        options = {"wrapper": {}, **options}
        saved = theirs("trained", sequential, "adam", save, legacy=legacy, **options)
        model = twin(sequential, saved)
        copy_weights(saved.weights, model)
        return saved, model

    return get


@pytest.mark.exhaustive
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize("save", sorted(WITH_SCALE))
def test_loss_scale_and_good_steps_are_loaded(save, legacy, wrapped):
    saved, model = wrapped(save, legacy, later=STEPS)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    # What the file says comes after what this run has seen.
    train(model, ours, range(2))
    copy_weights(saved.weights, model)

    load_optimizer_state(ours, saved.path)

    assert float(ours.loss_scale) == 2.0**10
    # Five good steps after the three.
    assert int(ours.dynamic_counter) == 8
    assert int(ours.iterations) == 5 and int(ours.skipped_steps) == 0
    assert_same_slots(ours, saved)
    train(model, ours, range(5, 5 + STEPS))
    assert_close_weights(model, saved.later)
    assert int(ours.dynamic_counter) == saved.counter


@pytest.mark.parametrize(
    "save, legacy", [("h5", True), ("h5", False), ("keras", False)]
)
def test_file_without_scale_resets_scale_with_warning(save, legacy, wrapped):
    saved, model = wrapped(save, legacy)
    inner = make_ours("adam")
    ours = keras_lso.LossScaleOptimizer(inner, initial_scale=2.0**7)
    built(ours, model)
    ours.dynamic_scale.assign(2.0**3)
    ours.step_counter.assign(5)
    with pytest.warns(UserWarning, match="no loss scale.*initial_scale=128") as record:
        load_optimizer_state(ours, saved.path)
    assert places(record) == [__file__]
    assert float(ours.loss_scale) == 2.0**7 and int(ours.dynamic_counter) == 0
    assert int(ours.skipped_steps) == 0
    assert_same_slots(ours, saved)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_optimizer_without_scale_loads_without_warning(save, wrapped):
    saved, model = wrapped(save)
    ours = built(make_ours("adam"), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


def test_checkpoint_of_bare_optimizer_warns_of_missing_scale(theirs):
    saved = theirs("trained", sequential, "adam", "checkpoint")
    model = twin(sequential, saved)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    with pytest.warns(UserWarning, match="no loss scale.*initial_scale=32768"):
        load_optimizer_state(ours, saved.path)


def test_fixed_scale_ignores_loaded_scale_with_warning(wrapped):
    saved, model = wrapped("checkpoint")
    ours = keras_lso.LossScaleOptimizer(make_ours("adam"), False, initial_scale=64)
    built(ours, model)
    with pytest.warns(UserWarning, match="1024.0 is ignored.*FixedLossScale") as record:
        load_optimizer_state(ours, saved.path)
    assert places(record) == [__file__]
    assert float(ours.loss_scale) == 64 and int(ours.iterations) == 5
    # A file without a scale has nothing to ignore.
    saved, _ = wrapped("h5")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_optimizer_state(ours, saved.path)


@pytest.mark.parametrize(
    "scale, good_steps, loaded, counter",
    [
        (2.0**40, 3, 2.0**24, 3),
        (0.0, 3, 2.0**-14, 3),
        (np.nan, 3, 2.0**15, 3),
        (2.0**10, 10**12, 2.0**10, 1999),
    ],
)
def test_loaded_scale_and_counter_out_of_bounds_are_corrected(
    scale, good_steps, loaded, counter, theirs
):
    saved = theirs("with_a_scale_of", scale, good_steps)
    model = twin(sequential, saved)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    load_optimizer_state(ours, saved.path)
    assert float(ours.loss_scale) == loaded
    assert int(ours.dynamic_counter) == counter


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_mixed_float16_model_resumes_like_tf_keras(save, theirs):
    """tf.keras keeps float32 variables under `mixed_float16`; so does Keras 3."""
    mixed = dense(None, None, dtype="mixed_float16")
    saved = theirs("trained", mixed, "adam", save, wrapper={}, later=STEPS)
    model = mixed(keras)
    copy_weights(saved.weights, model)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)
    train(model, ours, range(5, 5 + STEPS))
    assert_close_weights(model, saved.later)


def test_float32_masters_take_slots_of_float32_model(theirs):
    """Float16 variables have float32 masters, which carry their paths."""
    saved = theirs("trained", sequential, "adam", "checkpoint")
    model = dense(None, None, dtype="float16")(keras)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    with pytest.warns(UserWarning, match="no loss scale"):
        load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_state_loads_into_keras_loss_scale_optimizer(save, wrapped):
    saved, model = wrapped(save)
    ours = keras.optimizers.LossScaleOptimizer(make_ours("adam"), initial_scale=64.0)
    built(ours, model)
    ours.dynamic_scale.assign(8.0)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        load_optimizer_state(ours, saved.path)
    messages = [str(r.message) for r in record]
    assert any("no loss scale" in m for m in messages) == (save == "h5")
    assert float(ours.dynamic_scale) == (64.0 if save == "h5" else 2.0**10)
    assert int(ours.step_counter) == (0 if save == "h5" else 8)
    assert_same_slots(ours, saved)


def test_checkpoint_of_tf_2_2_wrapper_loads_slots_and_scale(theirs):
    saved = theirs("wrapped_as_in_2_2", nested)
    model = twin(nested, saved)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)
    assert float(ours.loss_scale) == 2.0**9 and int(ours.dynamic_counter) == 7


def test_file_of_tf_2_3_wrapper_loads_learning_rate(wrapped):
    """TF 2.3 called the wrapped optimizer's config `optimizer`."""
    import h5py

    saved, model = wrapped("h5", legacy=True)
    with h5py.File(saved.path, "r+") as file:
        config = json.loads(file.attrs["training_config"])
        wrapper = config["optimizer_config"]["config"]
        wrapper["optimizer"] = wrapper.pop("inner_optimizer")
        wrapper["optimizer"]["config"]["learning_rate"] = 0.25
        file.attrs["training_config"] = json.dumps(config).encode()
    ours = built(make_ours("adam"), model)
    load_optimizer_state(ours, saved.path)
    assert float(ours.learning_rate) == 0.25
