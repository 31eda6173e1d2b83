"""Whole files: the model and all state come back, and nothing warns.

Files hold a model that has trained, with an overflow in between, so that its scale,
its counters and its slots are not those of a new one. `test_resume.py` shows that
training goes on from there, and `test_across_backends.py` that it does so under another
backend.
"""

import zipfile

import h5py
import keras
import numpy as np
import pytest

from integration_tests.saved_models import (
    LOADERS,
    POLICIES,
    UNREGISTERED,
    UnregisteredLossScale,
    UnregisteredSGD,
    assert_same,
    assert_same_model,
    built_model,
    every_loader,
    every_policy,
    momentum_sgd,
    of_two,
    small_model,
    train,
    trained_model,
)
from keras_lso import LossScaleOptimizer
from testing.keras_versions import needs_multi_optimizer


def config_in(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read("config.json").decode()


@pytest.mark.exhaustive
@every_loader
@every_policy
def test_keras_file_restores_model_and_all_state(policy, load, tmp_path, no_warnings):
    model = trained_model(policy)
    assert int(model.optimizer.skipped_steps) == 2
    model.save(tmp_path / "model.keras")
    assert "keras.src" not in config_in(tmp_path / "model.keras")

    loaded = load(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_same_model(loaded, model)
    assert int(loaded.optimizer.skipped_steps) == 2


def test_sharded_weights_files_restore_all_state(tmp_path, no_warnings):
    model = trained_model("hysteresis")
    model.save_weights(tmp_path / "model.weights.json", max_shard_size=1e-7)
    assert len(list(tmp_path.glob("*.h5"))) > 1

    other = built_model(LossScaleOptimizer(momentum_sgd(), **POLICIES["hysteresis"]()))
    other.load_weights(tmp_path / "model.weights.json")
    assert_same_model(other, model)
    assert bool(other.optimizer.last_step_applied)


@needs_multi_optimizer
def test_multi_optimizer_is_restored_with_all_state(tmp_path, no_warnings):
    model = train(small_model(LossScaleOptimizer(of_two())))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    # Momentum of two kernels; momentum and velocity of two biases.
    slots = [v for v in model.optimizer.variables[:-1] if len(v.shape)]
    assert sum(np.any(v.numpy() != 0) for v in slots) == 6

    for load in LOADERS.values():
        loaded = load(tmp_path / "model.keras")
        assert_same_model(loaded, model)
    other = built_model(LossScaleOptimizer(of_two()))
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_model(other, model)
    assert_same_model(train(loaded, epochs=1), train(model, epochs=1))


def test_file_with_unregistered_classes_loads_with_custom_objects(
    tmp_path, no_warnings
):
    optimizer = LossScaleOptimizer(
        UnregisteredSGD(0.05, momentum=0.9), loss_scale=UnregisteredLossScale(64.0)
    )
    model = train(small_model(optimizer))
    model.save(tmp_path / "model.keras")

    for load in LOADERS.values():
        with pytest.raises(TypeError, match="Could not locate class 'UnregisteredSGD'"):
            load(tmp_path / "model.keras")
        loaded = load(tmp_path / "model.keras", custom_objects=UNREGISTERED)
        assert type(loaded.optimizer.inner_optimizer) is UnregisteredSGD
        assert type(loaded.optimizer.loss_scale_policy) is UnregisteredLossScale
        assert int(loaded.optimizer.loss_scale_policy.overflows.numpy()) == 2
        assert_same_model(loaded, model)


def sgd_model(momentum=0.0):
    return small_model(LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum)))


@pytest.mark.filterwarnings("error::UserWarning")
def test_state_without_slots_loads_before_optimizer_is_built(tmp_path):
    # It has all of its variables already, the loss scale's among them.
    model = train(sgd_model(), epochs=1)
    model.save_weights(tmp_path / "model.weights.h5")
    other = sgd_model()
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_model(other, model)
    for going_on in (model, other):
        train(going_on, epochs=1)
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations) > 2
    assert_same_model(other, model)


# Keras builds the optimizer that it loads from such a file for no variables, so no
# optimizer can go on from there, its own ones included. What it does bring back is
# the model, its weights and the optimizer's config. `tests/test_h5_models.py` has what
# `keras_lso.load_model` brings back.


# Saving one takes the optimizer out of the model's compile config, so these tests
# save models of their own.
@every_loader
@pytest.mark.parametrize("policy", ["default", "fixed", "hysteresis", "user's own"])
def test_legacy_h5_file_restores_model_and_config(policy, load, tmp_path, no_warnings):
    optimizer = LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]())
    model = built_model(optimizer)
    model.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as file:
        assert "keras.src" not in file.attrs["training_config"]

    loaded = load(tmp_path / "model.h5")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert_same(loaded.get_weights(), model.get_weights())
