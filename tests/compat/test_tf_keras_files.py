"""`load_optimizer_state` with files in the formats of tf.keras.

`integration_tests/test_load_optimizer_state.py` reads those that tf.keras wrote.
"""

import io
import json
import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_lso
from keras_lso.compat.tf_keras_files import load_optimizer_state, pair

SHAPES = [(2, 3), (3,), (3, 3)]
NAMES = ["dense/kernel", "dense/bias", "dense_1/kernel"]


@pytest.fixture
def variables():
    layers = [
        keras.layers.Dense(3, name="dense"),
        keras.layers.Dense(3, name="dense_1"),
    ]
    keras.Sequential([keras.Input((2,)), *layers])
    return [layers[0].kernel, layers[0].bias, layers[1].kernel]


def arrays(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def legacy(optimizer, **slots):
    """Returns the weights of an optimizer before TF 2.11: one slot after the other."""
    weights = {f"{optimizer}/iter:0": np.int64(7)}
    for slot, values in slots.items():
        for name, value in zip(NAMES, values, strict=True):
            weights[f"{optimizer}/{name}/{slot}:0"] = value
    return weights


def legacy_adam():
    return legacy("Adam", m=arrays(1), v=arrays(2))


def new_adam(scope="Adam/"):
    """Returns the weights of an Adam of TF 2.11: one variable after the other."""
    rows = zip(NAMES, arrays(1), arrays(2), strict=True)
    weights = {"iteration:0": np.int64(7)}
    for name, m, v in rows:
        weights[f"{scope}m/{name}:0"] = m
        weights[f"{scope}v/{name}:0"] = v
    return weights


@pytest.fixture
def write(tmp_path):
    """`write(weights, optimizer_config)`: the path of an HDF5 file of tf.keras."""

    def write(weights, config=None, chunk=None):
        path = tmp_path / "model.h5"
        with h5py.File(path, "w") as file:
            file.attrs["keras_version"] = "2.12.0"
            if config is not None:
                text = json.dumps({"optimizer_config": config})
                file.attrs["training_config"] = text.encode()
            group = file.create_group("optimizer_weights")
            for name, value in weights.items():
                group[name] = value
            names = [name.encode() for name in weights]
            if chunk is None:
                group.attrs["weight_names"] = names
            else:
                for i in range(0, len(names), chunk):
                    group.attrs[f"weight_names{i // chunk}"] = names[i : i + chunk]
        return path

    return write


@pytest.fixture
def write_archive(tmp_path):
    """`write_archive(values, config)`: the path of a `.keras` file of tf.keras."""

    def write(values, config=None, weights="model.weights.h5"):
        stream = io.BytesIO()
        with h5py.File(stream, "w") as file:
            group = file.create_group("optimizer/vars")
            for i, value in enumerate(values):
                group[str(i)] = value
        path = tmp_path / "model.keras"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", json.dumps({"keras_version": "2.12.0"}))
            text = json.dumps({"compile_config": {"optimizer": config}})
            archive.writestr("config.json", text)
            archive.writestr(weights, stream.getvalue())
        return path

    return write


@pytest.fixture
def adam(variables):
    optimizer = keras.optimizers.Adam(0.5)
    optimizer.build(variables)
    return optimizer


def to_numpy(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def assert_equal(actual, expected):
    for a, e in zip(to_numpy(actual), expected, strict=True):
        np.testing.assert_array_equal(a, e)


def assert_is_loaded(adam):
    assert int(adam.iterations) == 7
    assert_equal(adam._momentums, arrays(1))
    assert_equal(adam._velocities, arrays(2))


def assert_refused(optimizer, path, match, error=ValueError):
    before = [v.tobytes() for v in to_numpy(optimizer.variables)]
    with pytest.raises(error, match=match):
        load_optimizer_state(optimizer, path)
    assert [v.tobytes() for v in to_numpy(optimizer.variables)] == before


@pytest.mark.parametrize(
    "weights",
    [legacy_adam(), new_adam(), new_adam(scope=""), new_adam(scope="a/b/")],
    ids=["legacy", "new", "new without scope", "new in scopes"],
)
@pytest.mark.parametrize("chunk", [None, 2], ids=["whole", "chunks"])
def test_named_weights_load_from_h5_file(weights, chunk, write, adam):
    load_optimizer_state(adam, str(write(weights, chunk=chunk)))
    assert_is_loaded(adam)


def test_numbered_weights_load_from_keras_file(write_archive, adam):
    """TF 2.12 called the file in the archive `variables.h5`."""
    for config, weights in (
        (None, "model.weights.h5"),
        ({"class_name": "Custom>Adam", "config": {}}, "variables.h5"),
    ):
        adam.iterations.assign(0)
        path = write_archive(new_adam().values(), config, weights=weights)
        load_optimizer_state(adam, path)
        assert_is_loaded(adam)


@pytest.mark.parametrize("rate, loaded", [(0.25, 0.25), ({"class_name": "X"}, 0.5)])
@pytest.mark.parametrize("key", ["inner_optimizer", "optimizer"])
def test_learning_rate_is_loaded_from_config(
    key, rate, loaded, write, write_archive, adam
):
    """Before TF 2.4 the wrapper's config had the key `optimizer`."""
    config = {"class_name": "Adam", "config": {"learning_rate": rate}}
    wrapper = {"class_name": "LossScaleOptimizer", "config": {key: config}}
    for path in (
        write(legacy_adam(), config),
        write(new_adam(), wrapper),
        write_archive(new_adam().values(), wrapper),
    ):
        adam.learning_rate = 0.5
        load_optimizer_state(adam, path)
        assert float(adam.learning_rate) == loaded
        assert_is_loaded(adam)


def test_window_of_micro_batches_begins_anew(variables, write):
    adam = keras.optimizers.Adam(0.5, gradient_accumulation_steps=3)
    adam.build(variables)
    adam.apply([keras.ops.ones(shape) for shape in SHAPES])
    load_optimizer_state(adam, write(new_adam()))
    assert_is_loaded(adam)
    assert_equal(adam._accumulated_gradients, map(np.zeros, SHAPES))


def test_state_loads_through_larc_and_into_lars(write, variables):
    """The Model Garden's LARS was a legacy optimizer."""
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras_lso.LossScaleOptimizer(keras_lso.LARC(sgd))
    optimizer.build(variables)
    with pytest.warns(UserWarning, match="no loss scale"):
        load_optimizer_state(optimizer, write(legacy("SGD", momentum=arrays(1))))
    assert_equal(sgd.momentums, arrays(1))
    assert int(optimizer.iterations) == 7 and int(optimizer.skipped_steps) == 0
    lars = keras_lso.LARS(0.5, momentum=0.9)
    lars.build(variables)
    load_optimizer_state(lars, write(legacy("LARS", momentum=arrays(1))))
    assert_equal(lars.momentums, arrays(1))


@pytest.mark.parametrize(
    "names, paths, order",
    [
        # The same names, after the model's name.
        (["a/kernel", "b/kernel"], ["model/b/kernel", "model/a/kernel"], [1, 0]),
        # Numbered anew: `dense_1` is the second in the file and the first here.
        (["dense/k", "dense_1/k"], ["dense_1/k", "dense_2/k"], [0, 1]),
        (["bn/gamma", "bn/beta"], ["bn_3/beta", "bn_3/gamma"], [1, 0]),
        # The same names in two parts of a model: by their order.
        (["x/d/k", "y/d/k"], ["a/d/k", "b/d/k"], [0, 1]),
        # Renamed layers, renamed variables.
        (["a/kernel", "a/bias"], ["b/bias", "b/kernel"], [1, 0]),
        (["a/w", "a/x"], ["b/kernel", "b/bias"], [0, 1]),
        ([None, None], ["b/kernel", "a/kernel"], [0, 1]),
    ],
)
def test_pair_matches_names_to_paths(names, paths, order):
    assert pair(names, paths) == order


@pytest.mark.parametrize(
    "names, paths",
    [
        (["a/kernel", "b/kernel"], ["b/kernel", "c/kernel"]),
        (["dense/k", "dense_1/k", "hidden/k"], ["hidden/k", "dense/k", "out/k"]),
    ],
)
def test_pair_rejects_order_that_contradicts_names(names, paths):
    with pytest.raises(ValueError, match="might be taken for"):
        pair(names, paths)


def test_unbuilt_optimizer_wrong_type_and_missing_file_are_rejected(write, adam):
    with pytest.raises(TypeError, match="`optimizer` must be.*optimizer='adam'"):
        load_optimizer_state("adam", write(new_adam()))
    unbuilt = keras_lso.LossScaleOptimizer(keras.optimizers.Adam())
    with pytest.raises(ValueError, match=r"build\(model\.trainable_variables\)` first"):
        load_optimizer_state(unbuilt, write(new_adam()))
    assert_refused(adam, "missing.h5", "missing.h5", FileNotFoundError)


def test_saved_models_and_checkpoints_are_rejected_with_what_to_write(adam, tmp_path):
    (tmp_path / "checkpoint-1.index").write_bytes(b"")
    for path in (tmp_path, tmp_path / "checkpoint-1"):
        assert_refused(adam, path, r"not read.*`model.save\('model.h5'\)`")


def test_damaged_files_and_files_without_state_are_rejected(
    adam, write, write_archive, tmp_path
):
    path = tmp_path / "garbage.h5"
    path.write_bytes(b"garbage" * 100)
    assert_refused(adam, path, "neither an HDF5 file.*garbage.h5")
    for path in (write(new_adam()), write_archive(new_adam().values())):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert_refused(adam, path, "damaged")
    path = write(new_adam())
    with h5py.File(path, "r+") as file:
        del file["optimizer_weights/Adam/v/dense/kernel:0"]
    assert_refused(adam, path, "damaged")
    assert_refused(adam, write({}), "holds no optimizer state")
    assert_refused(adam, write({"Adam/iter:0": np.int64(0)}), "before the first step")


BIAS = "Adam/dense/bias/v:0"


@pytest.mark.parametrize(
    "change, match",
    [
        ({BIAS: None}, r"slot 'v' of 2 variables.*built for 3"),
        ({BIAS: np.ones(4, "float32")}, r"bias_velocity' has shape \(3,\).*\(4,\)"),
        ({BIAS: np.array([b"x"] * 3)}, "takes an array of numbers"),
        ({BIAS: np.full(3, np.nan, "float32")}, "must not be NaN"),
        ({BIAS: np.full(3, -np.inf, "float32")}, "must be finite"),
        ({"Adam/iter:0": np.int64(-1)}, "whole numbers from 0"),
        ({"Adam/iter:0": np.int64([7])}, "iteration' has shape"),
    ],
)
def test_wrong_counts_shapes_and_values_are_rejected(change, match, adam, write):
    weights = {**legacy_adam(), **change}
    weights = {name: value for name, value in weights.items() if value is not None}
    assert_refused(adam, write(weights), match)


def test_wrong_counts_or_shapes_without_names_are_rejected(adam, write_archive):
    values = list(new_adam().values())
    assert_refused(adam, write_archive(values[:-1]), "holds 5 slot variables.*make 6")
    assert_refused(adam, write_archive([values[0], *values[:0:-1]]), "has shape")


def test_state_of_other_class_with_same_slots_is_rejected_unless_adamw(
    variables, write
):
    config = {"class_name": "Adam", "config": {}}
    for cls, match in (
        (keras.optimizers.Adamax, "state of Adam, but .* is Adamax"),
        (keras.optimizers.Adafactor, "Only in the file"),
    ):
        optimizer = cls()
        optimizer.build(variables)
        assert_refused(optimizer, write(legacy_adam(), config), match)
    optimizer = keras.optimizers.AdamW()
    optimizer.build(variables)
    load_optimizer_state(optimizer, write(legacy_adam(), config))
    assert_is_loaded(optimizer)


def test_unknown_weights_are_rejected(adam, write):
    weights = {**new_adam(), "Adam/lookahead/dense/kernel:0": np.ones((2, 3))}
    assert_refused(adam, write(weights), "no place here: 'Adam/lookahead/dense/kernel'")


def test_slots_in_8_bits_take_the_numbers_of_a_file(write):
    weight = keras.Variable(np.zeros((64, 64)), dtype="float32", name="kernel")
    random = np.random.default_rng(0)
    m, v = random.normal(size=(2, 64, 64)).astype("float32")
    weights = {"Adam/iter:0": np.int64(7), "Adam/kernel/m:0": m}
    path = write(weights | {"Adam/kernel/v:0": np.square(v)})
    optimizer = keras_lso.GuardedOptimizer(
        keras.optimizers.Adam(0.5), slot_dtype="int8"
    )
    optimizer.build([weight])
    load_optimizer_state(optimizer, path)
    assert int(optimizer.iterations) == 7
    store: dict = {}
    optimizer.save_own_variables(store)
    of_slots = [value for value in store.values() if value.shape == (64, 64)]
    for found, right, levels in zip(of_slots, (m, v * v), (127, 255), strict=True):
        largest = np.abs(right).max(axis=1, keepdims=True)
        roots = levels * (np.abs(right) / largest) ** 0.25
        # Half of a level up, and a digit.
        limit = largest * ((roots + 0.51) ** 4 - roots**4) / levels**4
        assert (np.abs(found - right) <= limit).all()
