"""Files and configs of an earlier version load, and are saved with the same contents.

`written_before/write.py` wrote `written_before/1d3ee2d/` when that commit was checked
out. Only the modules of classes may differ: Keras finds a registered class by its
registered name.
"""

import io
import json
import pathlib
import zipfile

import h5py
import keras
import numpy as np
import pytest
from packaging.version import Version

import keras_lso
from integration_tests.written_before import write
from keras_lso.compat.tf_keras_configs import address_of

HERE = pathlib.Path(__file__).with_name("written_before") / "1d3ee2d"
FILES = sorted(HERE.glob("*.keras"))
CONFIGS = json.loads((HERE / "schedules.json").read_text())


# An older Keras rejects the configs of the layers.
needs_their_keras = pytest.mark.skipif(
    Version(keras.__version__) < Version("3.15"),
    reason="Keras 3.15 wrote the files, and an older one does not load its layers",
)


every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def read_archive(path):
    """Returns the config and the arrays in a `.keras` file."""
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
        arrays = {}

        def read(name, item):
            if isinstance(item, h5py.Dataset):
                arrays[name] = item[()]

        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            file.visititems(read)
    return config, arrays


def without_modules(config):
    """Returns a config in which no class of ours has a module."""
    if isinstance(config, list):
        return [without_modules(each) for each in config]
    if not isinstance(config, dict):
        return config
    is_ours = str(config.get("registered_name")).startswith("keras_lso>")
    return {
        key: without_modules(value)
        for key, value in config.items()
        if not (is_ours and key == "module")
    }


def test_stored_files_cover_every_optimizer():
    names = {path.stem for path in FILES}
    assert names == set(write.OPTIMIZERS)


@needs_their_keras
@every_file
def test_file_of_previous_version_round_trips(path, tmp_path):
    config, arrays = read_archive(path)
    if path.stem == "experimental":
        # The modern class replaces it, as in TensorFlow.
        config["compile_config"]["optimizer"].update(address_of("LossScaleOptimizer"))
    keras_lso.load_model(path).save(tmp_path / "model.keras")
    saved_config, saved_arrays = read_archive(tmp_path / "model.keras")
    assert without_modules(saved_config) == without_modules(config)
    assert saved_arrays.keys() == arrays.keys()
    if path.stem == "masters":  # This number now counts the masters.
        del arrays["optimizer/vars/1"]
    for name, array in arrays.items():
        # The width of integers depends on the backend.
        is_count = array.dtype.kind == "i"
        assert is_count or saved_arrays[name].dtype == array.dtype, name
        np.testing.assert_array_equal(saved_arrays[name], array, name)


@needs_their_keras
@every_file
def test_training_resumes_from_file_of_previous_version(path):
    model = keras_lso.load_model(path)
    model.train_on_batch(write.X, write.Y)
    expected = np.load(path.with_name("after_one_more_step.npz"))
    # Frameworks add two products in a different order: some units in the last place,
    # and a float16 has 11 bits.
    rtol = 2e-3 if path.stem == "masters" else 1e-5
    for i, value in enumerate(model.get_weights()):
        np.testing.assert_allclose(
            value, expected[f"{path.stem}/{i}"], rtol=rtol, atol=rtol / 10
        )


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="checkpoints are TensorFlow's"
)
@pytest.mark.parametrize("name", ["default", "log_max"])
def test_checkpoint_of_previous_version_restores_all_state(name):
    import tensorflow as tf

    path = HERE / f"{name}.checkpoint"
    model = write.make_model(name)
    write.train(model)
    expected = [np.array(v) for v in model.optimizer.variables]
    fresh = write.make_model(name)
    fresh.optimizer.build(fresh.trainable_variables)
    checkpoint = tf.train.Checkpoint(optimizer=fresh.optimizer)
    checkpoint.read(str(path)).assert_existing_objects_matched()
    for variable, value in zip(fresh.optimizer.variables, expected, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", write.SCHEDULES)
def test_schedule_config_of_previous_version_round_trips(name):
    schedule = keras.saving.deserialize_keras_object(CONFIGS[name])
    assert isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    again = json.loads(json.dumps(keras.saving.serialize_keras_object(schedule)))
    assert without_modules(again) == without_modules(CONFIGS[name])
    made = write.SCHEDULES[name]()
    for step in (0, 3, 10, 50, 1000):
        assert float(schedule(step)) == float(made(step))
