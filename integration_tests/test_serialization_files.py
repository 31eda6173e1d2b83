"""Files restore the model and all state of the optimizer, without a warning.

`tests/_core/test_policy_state.py` has the state of each policy, `test_resume.py` the
training after a file, and `test_across_backends.py` that under another backend.
"""

import h5py
import keras
import numpy as np
import pytest

from integration_tests.saved_models import (
    LOADERS,
    UNREGISTERED,
    CountingLossScale,
    UnregisteredLossScale,
    UnregisteredSGD,
    assert_same,
    assert_same_model,
    built_model,
    momentum_sgd,
    of_two,
    small_model,
    train,
)
from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale
from testing.keras_versions import needs_multi_optimizer


def hysteresis():
    policy = DynamicLossScale(2.0**10, 3, hysteresis=2)
    return LossScaleOptimizer(momentum_sgd(), loss_scale=policy)


def test_sharded_weights_files_restore_all_state(tmp_path, no_warnings):
    model = train(small_model(hysteresis()))
    model.save_weights(tmp_path / "model.weights.json", max_shard_size=1e-7)
    assert len(list(tmp_path.glob("*.h5"))) > 1

    other = built_model(hysteresis())
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


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dynamic": False, "initial_scale": 128.0},
        {"loss_scale": CountingLossScale(1024, min_scale=16)},
    ],
    ids=["default", "fixed", "a user's policy"],
)
def test_keras_loads_model_and_config_from_h5_file(arguments, tmp_path, no_warnings):
    """Keras loses the state: `tests/test_h5_models.py` has what we restore."""
    optimizer = LossScaleOptimizer(momentum_sgd(), **arguments)
    model = built_model(optimizer)
    model.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as file:
        assert "keras.src" not in file.attrs["training_config"]

    loaded = keras.saving.load_model(tmp_path / "model.h5")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert_same(loaded.get_weights(), model.get_weights())
