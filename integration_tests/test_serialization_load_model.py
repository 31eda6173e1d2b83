"""`keras_lso.load_model`: what it adopts, what it leaves alone, and what it refuses."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_lso
from integration_tests.saved_models import (
    UNREGISTERED,
    UnregisteredSGD,
    assert_same,
    built_model,
    momentum_sgd,
    small_model,
    state,
    train,
)
from keras_lso import LossScaleOptimizer


def keras_wrapper(inner=None):
    return keras.optimizers.LossScaleOptimizer(inner or momentum_sgd(), 2.0**10)


@pytest.fixture
def set_dtype_policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("policy_on_loading", ["mixed_float16", "float32"])
def test_load_model_replaces_wrapper_that_keras_added(
    policy_on_loading, set_dtype_policy, tmp_path, no_warnings
):
    # The file's config names the bare optimizer; its state is that of the wrapper.
    set_dtype_policy("mixed_float16")
    model = train(small_model(momentum_sgd()))
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    model.save(tmp_path / "model.keras")

    set_dtype_policy(policy_on_loading)
    optimizer = keras_lso.load_model(tmp_path / "model.keras").optimizer
    assert type(optimizer) is LossScaleOptimizer
    assert type(optimizer.inner_optimizer) is type(momentum_sgd())
    assert float(optimizer.loss_scale) == 2.0**13
    assert int(optimizer.iterations) == 4
    assert_same(
        state(optimizer)[1:], [v.numpy() for v in model.optimizer.variables][1:]
    )


@pytest.mark.parametrize("wrap", [keras_wrapper, LossScaleOptimizer, lambda o: o])
def test_load_model_accepts_compile_false(wrap, tmp_path, no_warnings):
    model = built_model(wrap(momentum_sgd()))
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras", compile=False)
    assert not loaded.compiled
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.parametrize("wrap", [keras_wrapper, LossScaleOptimizer])
def test_load_model_rejects_lambda_unless_safe_mode_is_off(wrap, tmp_path):
    model = built_model(
        wrap(momentum_sgd()), extra_layers=[layers.Lambda(lambda x: x * 2)]
    )
    with warnings.catch_warnings():
        # Keras says on saving what this test is about.
        warnings.simplefilter("ignore")
        model.save(tmp_path / "model.keras")

    with pytest.raises(ValueError, match="Python lambda"):
        keras_lso.load_model(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras", safe_mode=False)
    assert type(loaded.optimizer) is LossScaleOptimizer
    x = np.ones((1, 4), "float32")
    assert_same([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])


def test_load_model_passes_custom_objects_to_inner_optimizer(tmp_path, no_warnings):
    model = built_model(keras_wrapper(UnregisteredSGD(0.05, momentum=0.9)))
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras", custom_objects=UNREGISTERED)
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert type(loaded.optimizer.inner_optimizer) is UnregisteredSGD
    assert_same(loaded.get_weights(), model.get_weights())


def test_load_model_warns_that_wrapper_in_folder_is_not_replaced(tmp_path):
    model = small_model(keras_wrapper())
    model.save(tmp_path / "folder", zipped=False)
    with pytest.warns(UserWarning, match="Only in a `.keras` or `.h5` file"):
        loaded = keras_lso.load_model(tmp_path / "folder")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable("integration_tests")
class WithVocabulary(layers.Layer):
    """A layer with a file of its own inside the archive."""

    words = ""

    def call(self, x):
        return x

    def save_assets(self, folder):
        with open(f"{folder}/words.txt", "w") as file:
            file.write(self.words)

    def load_assets(self, folder):
        with open(f"{folder}/words.txt") as file:
            self.words = file.read()


def test_load_model_keeps_assets_of_archive(tmp_path, no_warnings):
    layer = WithVocabulary()
    model = built_model(keras_wrapper(), extra_layers=[layer])
    layer.words = "loss scale " * 1000
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.layers[1].words == layer.words
