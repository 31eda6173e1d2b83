"""What `load_optimizer_state` refuses: nothing is changed then."""

import os
import zipfile

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.loaded_states import built, make_ours, to_numpy, train, twin
from integration_tests.twin_models import OPTIMIZERS, WIDTH, dense, sequential
from keras_lso.mixed_precision import load_optimizer_state

# Keras's own, where it writes one.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")

SAVES = ["h5", "keras", "saved_model", "weights", "checkpoint", "checkpoint_folder"]


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_momentum_for_optimizer_without_momentum_is_rejected(save, theirs):
    legacy = save != "keras"
    saved = theirs("trained", sequential, "momentum", save, legacy=legacy)
    ours = built(make_ours("sgd"), twin(sequential, saved))
    with pytest.raises(ValueError, match=r"Only in the file: \['momentum'\]"):
        load_optimizer_state(ours, saved.path)
    assert int(ours.iterations) == 0


def assert_refused(ours, path, match, error=ValueError):
    before = [to_numpy(v).tobytes() for v in ours.variables]
    with pytest.raises(error, match=match):
        load_optimizer_state(ours, path)
    assert [to_numpy(v).tobytes() for v in ours.variables] == before


@pytest.fixture
def with_state():
    """An optimizer with a state of its own."""
    model = sequential(keras)
    optimizer = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    train(model, optimizer, range(3))
    return optimizer


@pytest.mark.parametrize("save", SAVES)
def test_file_of_model_without_optimizer_is_rejected(save, with_state, theirs):
    saved = theirs("without_optimizer", save)
    assert_refused(with_state, saved.path, "holds no optimizer state")


@pytest.mark.parametrize("save", ["h5", "saved_model"])
def test_model_saved_without_its_optimizer_is_rejected(save, with_state, theirs):
    saved = theirs("without_its_optimizer", save)
    assert_refused(with_state, saved.path, "holds no optimizer state")


def test_keras_file_of_legacy_optimizer_is_rejected(with_state, theirs):
    for wrapper in (None, {}):
        options = dict(legacy=True, wrapper=wrapper)
        saved = theirs("trained", sequential, "adam", "keras", **options)
        assert_refused(with_state, saved.path, "never writes that of .*legacy")


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_file_of_untrained_optimizer_is_rejected(save, with_state, theirs):
    saved = theirs("untrained", save)
    assert_refused(with_state, saved.path, "no optimizer state")


def test_error_names_several_optimizers_in_checkpoint(with_state, theirs):
    saved = theirs("with_two_optimizers")
    assert_refused(with_state, saved.path, "2 optimizers: .*'critic', 'generator'")


@pytest.mark.parametrize("ending", [".keras", ".h5", ".weights.h5"])
def test_file_of_keras_3_is_rejected(ending, with_state, tmp_path):
    model = sequential(keras)
    model.compile(make_ours("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    path = str(tmp_path / f"model{ending}")
    save = model.save_weights if ending == ".weights.h5" else model.save
    save(path)
    assert_refused(with_state, path, r"Keras 3.*keras_lso\.load_model")


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a checkpoint of TensorFlow"
)
def test_checkpoint_of_keras_3_is_rejected(with_state, tmp_path):
    import tensorflow as tf

    model = sequential(keras)
    optimizer = built(keras.optimizers.Adam(), model)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(
        str(tmp_path / "checkpoint")
    )
    assert_refused(with_state, path, "written by Keras 3")


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
@pytest.mark.parametrize(
    "layers, width, name, arguments, match",
    [
        (3, WIDTH, *OPTIMIZERS["adam"], r"variables|\d+ slot"),
        (2, 3, *OPTIMIZERS["adam"], "has shape"),
        (2, WIDTH, "Adam", {"amsgrad": True}, "vhat"),
        (2, WIDTH, "Adam", {"use_ema": True}, "average"),
        (2, WIDTH, "Adagrad", {}, "of Adagrad|accumulator|4 slot variables"),
        (2, WIDTH, "Lion", {}, "of Lion|'v'"),
    ],
    ids=["count", "shape", "vhat", "average", "Adagrad", "Lion"],
)
def test_mismatched_counts_shapes_classes_and_slots_are_rejected(
    layers, width, name, arguments, match, save, with_state, theirs
):
    make = dense(*layers * [None], width=width)
    optimizer = lambda k: getattr(k.optimizers, name)(**arguments)  # noqa: E731
    saved = theirs("trained", make, optimizer, save)
    assert_refused(with_state, saved.path, match)


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint", "saved_model"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_truncated_file_is_rejected(save, share, with_state, theirs):
    saved = theirs("trained", sequential, "adam", save, record=f"whole {save}")
    path = saved.path
    if save == "checkpoint":
        path += ".data-00000-of-00001"
    if save == "saved_model":
        path += "/variables/variables.data-00000-of-00001"
    with open(path, "r+b") as file:
        file.truncate(int(share * os.path.getsize(path)))
    assert_refused(with_state, saved.path, "damaged|neither an HDF5")


def test_folder_without_checkpoint_is_rejected(with_state, tmp_path):
    assert_refused(with_state, tmp_path, "neither a SavedModel nor a checkpoint")


def test_name_based_checkpoint_of_session_is_rejected(with_state, theirs):
    assert_refused(with_state, theirs("of_a_session").path, "tf.train.Checkpoint")


def test_rejected_file_leaves_wrapper_and_loss_scale_unchanged(with_state, theirs):
    """The scale of a file with a foreign optimizer is not taken."""
    adagrad = lambda k: k.optimizers.Adagrad()  # noqa: E731
    saved = theirs("trained", sequential, adagrad, "checkpoint", wrapper={})
    assert_refused(with_state, saved.path, r"Only in the file: \['accumulator'\]")


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_nan_in_slot_is_rejected(save, with_state, theirs):
    """The next step would make weights NaN, though the gradients are finite."""
    saved = theirs("with_slots_of", "_momentums", np.nan, save)
    assert_refused(with_state, saved.path, "momentum.*must not be NaN")


def test_keras_file_without_weights_is_rejected(with_state, tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    assert_refused(with_state, path, "holds no optimizer state")
