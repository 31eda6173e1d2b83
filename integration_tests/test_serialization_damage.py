"""Damaged files are refused, and nothing is half loaded."""

import zipfile

import h5py
import keras
import numpy as np
import pytest

from integration_tests.saved_models import (
    assert_same,
    built_model,
    every_loader,
    momentum_sgd,
    trained_model,
)
from keras_lso import LossScaleOptimizer

pytestmark = pytest.mark.in_turn


def shorten_a_slot(variables):
    shape = variables["6"].shape
    del variables["6"]
    variables["6"] = np.zeros((shape[0] - 1, *shape[1:]), "float32")


def flatten_the_last_slot(variables):
    del variables["9"]
    variables["9"] = np.float32(0)


def lengthen_the_scale(variables):
    del variables["3"]
    variables["3"] = np.full(2, 64, "float32")


def rename_the_scale(variables):
    variables.move("3", "33")


DAMAGED_FILES = {
    "a slot too short": (shorten_a_slot, "shape"),
    "a scalar for a slot": (flatten_the_last_slot, "shape"),
    "two scales": (lengthen_the_scale, "shape"),
    "no scale": (rename_the_scale, "'3'"),
}
every_damage = pytest.mark.parametrize(
    ("damage", "words"), DAMAGED_FILES.values(), ids=DAMAGED_FILES.keys()
)


@every_damage
def test_damaged_weights_file_is_rejected_without_partial_load(damage, words, tmp_path):
    path = tmp_path / "model.weights.h5"
    trained_model().save_weights(path)
    with h5py.File(path, "r+") as file:
        damage(file["optimizer/vars"])

    other = built_model(LossScaleOptimizer(momentum_sgd()))
    before = [v.numpy() for v in other.optimizer.variables]
    with pytest.raises(ValueError, match=words):
        other.load_weights(path)
    assert_same([v.numpy() for v in other.optimizer.variables], before)
    with pytest.warns(UserWarning, match=words):
        other.load_weights(path, skip_mismatch=True)
    assert_same([v.numpy() for v in other.optimizer.variables], before)


@pytest.mark.exhaustive
@every_damage
@every_loader
def test_damaged_keras_file_is_rejected(damage, words, load, tmp_path):
    trained_model().save(tmp_path / "good.keras")
    with zipfile.ZipFile(tmp_path / "good.keras") as good:
        good.extractall(tmp_path)
    with h5py.File(tmp_path / "model.weights.h5", "r+") as file:
        damage(file["optimizer/vars"])
    with zipfile.ZipFile(tmp_path / "bad.keras", "w") as bad:
        for name in good.namelist():
            bad.write(tmp_path / name, name)

    with pytest.raises(ValueError, match=words):
        load(tmp_path / "bad.keras")


@pytest.mark.in_turn("tensorflow")
def test_file_with_more_variables_is_skipped_with_warning(tmp_path):
    path = tmp_path / "model.weights.h5"
    trained_model().save_weights(path)

    other = built_model(LossScaleOptimizer(keras.optimizers.SGD()))
    before = [v.numpy() for v in other.optimizer.variables]
    with pytest.warns(UserWarning, match="has 6 variables .* optimizer has 10"):
        other.load_weights(path)
    assert_same([v.numpy() for v in other.optimizer.variables], before)


@pytest.mark.in_turn("jax")
def test_file_with_same_count_but_other_shapes_is_rejected(tmp_path):
    # Six: those of a bare optimizer with four slots, or of the wrapper of one
    # without any.
    path = tmp_path / "model.weights.h5"
    built_model(momentum_sgd()).save_weights(path)

    other = built_model(LossScaleOptimizer(keras.optimizers.SGD(0.05)))
    before = [v.numpy() for v in other.optimizer.variables]
    with pytest.raises(ValueError, match="shape"):
        other.load_weights(path)
    assert_same([v.numpy() for v in other.optimizer.variables], before)
