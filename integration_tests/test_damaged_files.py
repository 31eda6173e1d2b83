"""Damaged and hostile files: refused with a clear error, or loaded into a sane state.

Every file here was good once and has one thing wrong: it is cut off, has other bytes,
a wrong value, shape, dtype or class, or names code that is to run. Each is written to
disk and loaded as a user would. Whatever it is, a loader may do two things with it:

- refuse it, with an error that says what is wrong, and change nothing of the optimizer;
- take it, and leave an optimizer whose scale lies within its bounds, whose counters are
  not negative, and which trains on.

Nothing that a file names is ever run. Each test loads so many files as `FEWEST` says.
"""

import io
import json
import types

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests import damage
from integration_tests.damage_verdicts import (
    REFUSALS_OF_KERAS,
    assert_sane,
    attempt,
    bits,
    number,
    quietly,
)
from keras_lso import LossScaleOptimizer
from keras_lso.compat import untrusted_files
from keras_lso.loss_scales import DynamicLossScale
from keras_lso.mixed_precision import load_optimizer_state

# What reads a file, and what refuses one, is the same on every backend.
pytestmark = pytest.mark.default_backend("torch")

# For each test the least number of files, of which an empty loop has none.
FEWEST = {
    "test_keras_file_with_damaged_bytes_is_rejected_or_loads_sanely": 42,
    "test_keras_file_with_damaged_members_is_rejected_or_loads_sanely": 50,
    "test_weights_file_with_damaged_bytes_is_rejected_or_loads_sanely": 52,
    "test_tf_keras_file_with_damaged_bytes_is_rejected_or_loads_sanely": 52,
    "test_h5_model_with_damaged_bytes_is_rejected_or_loads_sanely": 52,
    "test_h5_model_with_wrong_arrays_is_rejected_or_loads_sanely": 20,
    "test_h5_model_with_wrong_attributes_is_rejected_or_loads_sanely": 60,
    "test_weights_file_with_wrong_arrays_is_rejected_or_loads_sanely": 20,
    "test_file_with_wrong_structure_is_rejected_or_loads_sanely": 4,
    "test_tf_keras_file_with_wrong_arrays_is_rejected_or_loads_sanely": 20,
    "test_tf_keras_file_with_wrong_attributes_is_rejected_or_loads_sanely": 60,
    "test_damaged_or_oversized_archive_is_rejected": 2,
}
LOADED = []


@pytest.fixture(autouse=True)
def enough_files(request):
    """Fails a test that has loaded fewer files than it should."""
    LOADED.clear()
    yield
    assert len(LOADED) >= FEWEST.get(request.node.originalname, 0)


# --- Good files ---------------------------------------------------------------


def make_model():
    policy = DynamicLossScale(
        2.0**10, 3, min_scale=2.0, max_scale=2.0**20, hysteresis=2
    )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    inner = keras.optimizers.SGD(0.5, momentum=0.5)
    model.compile(LossScaleOptimizer(inner, loss_scale=policy), loss="mse")
    return reset(model)


# iteration, learning rate, step counter, scale, then those of SGD, then the policy's.
STATE = [7, 0.0, 1, 512.0, 5, 0.5, 0.25, 0.125, 1]
NAMES = ["iteration", "wrapper's rate", "step counter", "scale", "applied", "rate"]
NAMES += ["kernel's momentum", "bias's momentum", "overflows left"]


def reset(model):
    model.optimizer.build(model.trainable_variables)
    for variable in model.weights:
        variable.assign(np.ones(variable.shape))
    saved = model.optimizer.variables
    for variable, value in zip(saved, [*STATE, 0], strict=True):
        variable.assign(np.full(variable.shape, value))
    return model


def tf_keras_file():
    """What `model.save("model.h5")` writes in tf.keras, of a legacy Adam."""
    config = {"class_name": "Adam", "config": {"learning_rate": 0.5, "decay": 0.0}}
    weights = {"Adam/iter:0": np.int64(7)}
    for slot in "mv":
        for name, shape in (("kernel", (3, 2)), ("bias", (2,))):
            value = np.full(shape, 0.5, "float32")
            weights[f"Adam/dense/{name}/{slot}:0"] = value
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file.attrs["keras_version"] = "2.12.0"
        file.attrs["training_config"] = json.dumps({"optimizer_config": config})
        group = file.create_group("optimizer_weights")
        group.attrs["weight_names"] = [name.encode() for name in weights]
        for name, value in weights.items():
            group[name] = value
    return stream.getvalue()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The bytes of good files, and models to load weights and state into."""
    folder = tmp_path_factory.mktemp("good")
    model = make_model()
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    model.save(folder / "model.h5")
    adam = LossScaleOptimizer(keras.optimizers.Adam(0.25), initial_scale=64.0)
    adam.build(make_model().trainable_variables)
    return types.SimpleNamespace(
        keras=(folder / "model.keras").read_bytes(),
        weights=(folder / "model.weights.h5").read_bytes(),
        h5=(folder / "model.h5").read_bytes(),
        tf_keras=tf_keras_file(),
        model=model,
        adam=adam,
    )


# --- Loading damaged ones -----------------------------------------------------


def load_file(data, path, label, load=keras_lso.load_model, names=()):
    """Loads a `.keras` or `.h5` file; what comes of it is refused or sane."""
    path.write_bytes(data)
    LOADED.append(label)
    model = attempt(lambda: load(path), label, names)
    if model is None:
        return
    assert isinstance(model, keras.Model), label
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer.build(model.trainable_variables)
        with quietly():
            assert_sane(optimizer, label)


def load_weights(data, path, good, label, names=()):
    """Loads a `.weights.h5` file into a model that has a state of its own."""
    path.write_bytes(data)
    model = reset(good.model)
    before = bits(model.optimizer.variables)
    LOADED.append(label)
    is_loaded = attempt(
        lambda: model.load_weights(path) or True, label, names, REFUSALS_OF_KERAS
    )
    if is_loaded and bits(model.optimizer.variables) != before:
        assert_sane(model.optimizer, label)
    elif not is_loaded:
        assert bits(model.optimizer.variables) == before, label
    return bool(is_loaded)


def load_tf_keras(data, path, good, label, names=()):
    """Loads the optimizer state of a file of tf.keras."""
    path.write_bytes(data)
    adam = good.adam
    for variable in adam.variables:
        variable.assign(np.full(variable.shape, 3))
    before = bits(adam.variables)
    LOADED.append(label)
    is_loaded = attempt(lambda: load_optimizer_state(adam, path) or True, label, names)
    if is_loaded:
        assert_sane(adam, label)
    else:
        assert bits(adam.variables) == before, label
    return bool(is_loaded)


# --- The good ones ------------------------------------------------------------


def test_undamaged_files_load_with_their_state(good, tmp_path):
    path = tmp_path / "model.keras"
    path.write_bytes(good.keras)
    for load in (keras.saving.load_model, keras_lso.load_model):
        optimizer = load(path).optimizer
        assert [number(ops.max(v)) for v in optimizer.variables[:-1]] == STATE
        assert_sane(optimizer, "good")
    assert load_weights(good.weights, tmp_path / "m.weights.h5", good, "good")
    assert load_tf_keras(good.tf_keras, tmp_path / "m.h5", good, "good")


# --- Cut off, and with other bytes --------------------------------------------


def test_keras_file_with_damaged_bytes_is_rejected_or_loads_sanely(good, tmp_path):
    for label, data in damage.damaged_bytes(good.keras, 1, truncated=12, flipped=30):
        load_file(data, tmp_path / "model.keras", label)


def test_keras_file_with_damaged_members_is_rejected_or_loads_sanely(good, tmp_path):
    """As if whoever damaged it had mended the archive's checksums."""
    contents = damage.members(good.keras)
    for name, seed in ((damage.CONFIG, 2), (damage.WEIGHTS, 3)):
        for label, data in damage.damaged_bytes(contents[name], seed, 8, 16):
            data = damage.archive_of({**contents, name: data})
            load_file(data, tmp_path / "model.keras", (name, label))
    for name in contents:
        data = damage.archive_of({k: v for k, v in contents.items() if k != name})
        label = f"{name} is missing"
        load_file(data, tmp_path / "model.keras", label)


def test_weights_file_with_damaged_bytes_is_rejected_or_loads_sanely(good, tmp_path):
    for label, data in damage.damaged_bytes(good.weights, 4, truncated=12, flipped=40):
        load_weights(data, tmp_path / "model.weights.h5", good, label)


def test_h5_model_with_damaged_bytes_is_rejected_or_loads_sanely(good, tmp_path):
    for label, data in damage.damaged_bytes(good.h5, 6, truncated=12, flipped=40):
        load_file(data, tmp_path / "model.h5", label)


def test_tf_keras_file_with_damaged_bytes_is_rejected_or_loads_sanely(good, tmp_path):
    for label, data in damage.damaged_bytes(good.tf_keras, 5, truncated=12, flipped=40):
        load_tf_keras(data, tmp_path / "model.h5", good, label)


# --- Wrong arrays -------------------------------------------------------------

# Loaded as they are: a slot is inf where Adam's second moment has overflowed.
TAKEN = ("0", "bools", "big-endian", "float16", "long doubles", "uint16")


@pytest.mark.parametrize("index", range(len(STATE)), ids=NAMES)
def test_weights_file_with_wrong_arrays_is_rejected_or_loads_sanely(
    index, good, tmp_path
):
    name = f"optimizer/vars/{index}"
    with h5py.File(io.BytesIO(good.weights)) as file:
        array = file[name][()]
    variable = good.model.optimizer.variables[index].path
    for label, wrong in damage.wrong_arrays(np.asarray(array)):
        data = damage.with_h5(
            good.weights, lambda file, v=wrong: damage.replaced(file, name, v)
        )
        path = tmp_path / "model.weights.h5"
        # A group Keras 3.15 refuses by itself, which 3.12 does not.
        more = [] if isinstance(wrong, np.ndarray) else ["Dataset"]
        names = [variable, *more]
        is_taken = load_weights(data, path, good, f"{name}: {label}", names)
        assert is_taken or label not in TAKEN, f"{name}: {label}"


@pytest.mark.parametrize("index", range(len(STATE)), ids=NAMES)
def test_h5_model_with_wrong_arrays_is_rejected_or_loads_sanely(index, good, tmp_path):
    with h5py.File(io.BytesIO(good.h5)) as file:
        group = file["optimizer_weights"]
        name = f"optimizer_weights/{group.attrs['weight_names'][index]}"
        array = np.asarray(file[name][()])
    for label, wrong in damage.wrong_arrays(array):
        data = damage.with_h5(
            good.h5, lambda file, v=wrong: damage.replaced(file, name, v)
        )
        load_file(data, tmp_path / "model.h5", f"{name}: {label}")


@pytest.mark.parametrize("label", damage.structures("", ""))
def test_file_with_wrong_structure_is_rejected_or_loads_sanely(label, good, tmp_path):
    change = damage.structures("optimizer/vars", "3")[label]
    data = damage.with_h5(good.weights, change)
    load_weights(data, tmp_path / "model.weights.h5", good, label)
    contents = damage.members(good.keras)
    data = damage.archive_of({**contents, damage.WEIGHTS: data})
    load_file(data, tmp_path / "model.keras", label)

    change = damage.structures("optimizer_weights", "loss_scale_optimizer/iteration")
    data = damage.with_h5(good.h5, change[label])
    load_file(data, tmp_path / "model.h5", label)

    for name in ("Adam/iter:0", "Adam/dense/kernel/m:0"):
        change = damage.structures("optimizer_weights", name)[label]
        data = damage.with_h5(good.tf_keras, change)
        is_loaded = load_tf_keras(data, tmp_path / "model.h5", good, label)
        assert is_loaded == (label == "one more"), label


@pytest.mark.parametrize("name", ["Adam/iter:0", "Adam/dense/kernel/m:0"])
def test_tf_keras_file_with_wrong_arrays_is_rejected_or_loads_sanely(
    name, good, tmp_path
):
    name = f"optimizer_weights/{name}"
    with h5py.File(io.BytesIO(good.tf_keras)) as file:
        array = np.asarray(file[name][()])
    for label, wrong in damage.wrong_arrays(array):
        data = damage.with_h5(
            good.tf_keras, lambda file, v=wrong: damage.replaced(file, name, v)
        )
        load_tf_keras(data, tmp_path / "model.h5", good, f"{name}: {label}")


ATTRIBUTES = {
    "weight_names": [b"Adam/iter:0", b"", 3, 0.5, "\ud800".encode("utf8", "replace")],
    "training_config": [b"", b"{", b"[]", b"1", b"\xff", b"[" * 10**5, 3, 0.5],
    "keras_version": [b"3.15.1", b"99", b"\xff", 3],
}


def with_wrong_attributes(data):
    """Yields labels and files, of which each has one attribute that is wrong."""
    for key, values in ATTRIBUTES.items():
        for value in values:

            def change(file, key=key, value=value):
                group = file["optimizer_weights"] if key == "weight_names" else file
                group.attrs[key] = value

            yield f"{key}: {str(value)[:9]}", damage.with_h5(data, change)


def test_h5_model_with_wrong_attributes_is_rejected_or_loads_sanely(good, tmp_path):
    path = tmp_path / "model.h5"
    for label, data in with_wrong_attributes(good.h5):
        load_file(data, path, label)
    with h5py.File(io.BytesIO(good.h5)) as file:
        config = json.loads(file.attrs["training_config"])
    # The arguments of Keras's optimizers are the business of `test_damaged_configs.py`.
    paths = [
        p for p in damage.paths_in(config) if p[-3:-1] != ("inner_optimizer", "config")
    ]
    for label, _, wrong in damage.damaged_values(config, paths, damage.FEW_VALUES):

        def change(file, wrong=wrong):
            file.attrs["training_config"] = json.dumps(wrong)

        load_file(damage.with_h5(good.h5, change), path, label)


def test_tf_keras_file_with_wrong_attributes_is_rejected_or_loads_sanely(
    good, tmp_path
):
    path = tmp_path / "model.h5"
    for label, data in with_wrong_attributes(good.tf_keras):
        load_tf_keras(data, path, good, label)
    config = {"optimizer_config": {"class_name": "Adam", "config": {}}}
    paths = [("optimizer_config", "config", k) for k in ("learning_rate", "decay")]
    for path_ in paths:
        config["optimizer_config"]["config"][path_[-1]] = 0.5
    paths += list(damage.paths_in(config))[:3]
    for label, _, wrong in damage.damaged_values(config, paths, damage.FEW_VALUES):

        def change(file, wrong=wrong):
            file.attrs["training_config"] = json.dumps(wrong)

        load_tf_keras(damage.with_h5(good.tf_keras, change), path, good, label)


# --- The archive itself -------------------------------------------------------


@pytest.mark.parametrize("label", damage.ARCHIVES)
def test_damaged_or_oversized_archive_is_rejected(label, good, tmp_path, monkeypatch):
    # The bombs of this test are small ones.
    monkeypatch.setattr(untrusted_files, "_LARGE", 2**20)
    data = damage.ARCHIVES[label](damage.members(good.keras))
    path = tmp_path / "model.keras"
    path.write_bytes(data)
    LOADED.append(label)
    with quietly(), pytest.raises((ValueError, TypeError)) as error:
        keras_lso.load_model(path)
    assert "damaged" in str(error.value) or "unpacked" in str(error.value)
    # `load_optimizer_state` reads archives as well.
    assert not load_tf_keras(data, tmp_path / "tf_keras.keras", good, label)


def test_load_model_without_compile_ignores_broken_optimizer_config(good, tmp_path):
    """`compile=False` is the way out that the errors name."""
    path = tmp_path / "model.keras"
    broken = {"class_name": "LossScaleOptimizer", "config": {"optimizer": 3}}

    def change(config):
        config["compile_config"]["optimizer"] = broken
        return config

    path.write_bytes(damage.with_config(good.keras, change))
    with pytest.raises(ValueError, match="loss_scale"):
        keras_lso.load_model(path)
    model = keras_lso.load_model(path, compile=False)
    assert all((w == 1).all() for w in model.get_weights())
