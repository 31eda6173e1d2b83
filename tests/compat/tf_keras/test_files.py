import builtins
import io
import json
import zipfile

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso.compat.tf_keras.files import load_optimizer_state
from keras_lso.compat.tf_keras.names import pair
from keras_lso.compat.tf_keras.state import layout_of

h5py = pytest.importorskip("h5py")

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


def legacy_adam(iterations=7, names=NAMES, dtype="float32"):
    """What an Adam of before TF 2.11 had as weights: all of one slot, then the next."""
    slots = zip("mv", (arrays(1), arrays(2)), strict=True)
    return {
        "Adam/iter:0": np.int64(iterations),
        **{
            f"Adam/{name}/{slot}:0": value.astype(dtype)
            for slot, values in slots
            for name, value in zip(names, values, strict=True)
        },
    }


def new_adam(iterations=7, scope="Adam/"):
    """What an Adam of TF 2.11 had: the slots of one variable, then the next."""
    rows = zip(NAMES, arrays(1), arrays(2), strict=True)
    weights = {"iteration:0": np.int64(iterations)}
    for name, m, v in rows:
        weights[f"{scope}m/{name}:0"] = m
        weights[f"{scope}v/{name}:0"] = v
    return weights


@pytest.fixture
def write(tmp_path):
    """`write(weights, optimizer_config)`: the path of an HDF5 file of tf.keras."""

    def write(weights, config=None, chunk=None, version="2.12.0"):
        path = tmp_path / "model.h5"
        with h5py.File(path, "w") as file:
            file.attrs["keras_version"] = version
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

    def write(values, config=None, version="2.12.0", weights="model.weights.h5"):
        stream = io.BytesIO()
        with h5py.File(stream, "w") as file:
            group = file.create_group("optimizer/vars")
            for i, value in enumerate(values):
                group[str(i)] = value
        path = tmp_path / "model.keras"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", json.dumps({"keras_version": version}))
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


def assert_is_loaded(adam, iterations=7):
    assert int(adam.iterations) == iterations
    assert_equal(adam._momentums, arrays(1))
    assert_equal(adam._velocities, arrays(2))


def assert_refused(optimizer, path, match, error=ValueError):
    before = [v.tobytes() for v in to_numpy(optimizer.variables)]
    with pytest.raises(error, match=match):
        load_optimizer_state(optimizer, path)
    assert [v.tobytes() for v in to_numpy(optimizer.variables)] == before


# --- What tf.keras wrote ----------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "weights",
    [legacy_adam(), new_adam(), new_adam(scope=""), new_adam(scope="a/b/")],
    ids=["legacy", "new", "new without scope", "new in scopes"],
)
@pytest.mark.parametrize("chunk", [None, 2], ids=["whole", "chunks"])
def test_named_weights_load_from_h5_file(weights, chunk, write, adam):
    load_optimizer_state(adam, str(write(weights, chunk=chunk)))
    assert_is_loaded(adam)


def test_load_optimizer_state_accepts_path_object(write, adam):
    load_optimizer_state(adam, write(new_adam()))
    assert_is_loaded(adam)


@pytest.mark.parametrize("config", [None, {"class_name": "Adam", "config": {}}])
@pytest.mark.parametrize("weights", ["model.weights.h5", "variables.h5"])
def test_numbered_weights_load_from_keras_file(config, weights, write_archive, adam):
    path = write_archive(new_adam().values(), config, weights=weights)
    load_optimizer_state(adam, path)
    assert_is_loaded(adam)


@pytest.mark.parametrize(
    "cls, arguments, config, expected",
    [
        ("SGD", {}, {"momentum": 0.0}, [["momentum"]]),
        ("SGD", {}, None, [["momentum"]]),
        ("Adam", {"amsgrad": True}, None, [["m", "v"], ["vhat"]]),
        ("Adam", {}, {"amsgrad": True}, [["m", "v"], ["vhat"]]),
        ("Adam", {"amsgrad": True}, {"amsgrad": False}, [["m", "v"]]),
        ("AdamW", {"use_ema": True}, None, [["average"], ["m", "v"]]),
        ("AdamW", {}, {"use_ema": True}, [["average"], ["m", "v"]]),
        ("RMSprop", {}, None, [["rms"]]),
        ("RMSprop", {}, {"centered": True}, [["rms"], ["mg"]]),
        ("RMSprop", {"momentum": 0.5}, None, [["rms"], ["momentum"]]),
        ("Adadelta", {}, None, [["accum_grad", "accum_var"]]),
        ("Adamax", {}, None, [["m", "v"]]),
        ("Ftrl", {}, {}, [["accumulator", "linear"]]),
        ("Lion", {}, {}, [["m"]]),
    ],
)
def test_slot_layout_follows_config(cls, arguments, config, expected, variables):
    optimizer = getattr(keras.optimizers, cls)(**arguments)
    optimizer.build(variables)
    assert layout_of(optimizer, config) == expected


@pytest.mark.parametrize("rate, loaded", [(0.25, 0.25), ({"class_name": "X"}, 0.5)])
def test_learning_rate_is_loaded_from_config(rate, loaded, write, write_archive, adam):
    config = {"class_name": "Adam", "config": {"learning_rate": rate}}
    wrapper = {
        "class_name": "LossScaleOptimizer",
        "config": {"inner_optimizer": config},
    }
    for path in (
        write(legacy_adam(), config),
        write(new_adam(), wrapper),
        write_archive(new_adam().values(), wrapper),
    ):
        adam.learning_rate = 0.5
        load_optimizer_state(adam, path)
        assert float(adam.learning_rate) == loaded
        assert_is_loaded(adam)


def test_wrapper_config_before_tf_2_4_gives_learning_rate(write, adam):
    config = {"class_name": "Adam", "config": {"learning_rate": 0.25}}
    wrapper = {"class_name": "LossScaleOptimizer", "config": {"optimizer": config}}
    load_optimizer_state(adam, write(legacy_adam(), wrapper))
    assert float(adam.learning_rate) == 0.25
    assert_is_loaded(adam)


def test_class_name_with_custom_prefix_loads(write, adam):
    config = {"class_name": "Custom>Adam", "config": {}}
    load_optimizer_state(adam, write(new_adam(), config))
    assert_is_loaded(adam)


def test_state_loads_through_larc_wrapper(write, variables):
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras_lso.LossScaleOptimizer(keras_lso.LARC(sgd))
    optimizer.build(variables)
    weights = {"SGD/iter:0": np.int64(7)}
    for name, value in zip(NAMES, arrays(1), strict=True):
        weights[f"SGD/{name}/momentum:0"] = value
    with pytest.warns(UserWarning, match="no loss scale"):
        load_optimizer_state(optimizer, write(weights))
    assert_equal(sgd.momentums, arrays(1))
    assert int(optimizer.iterations) == 7 and int(optimizer.skipped_steps) == 0


def test_lars_takes_slots_of_same_name(write, variables):
    """The Model Garden's LARS was an optimizer of before TF 2.11."""
    lars = keras_lso.LARS(0.5, momentum=0.9)
    lars.build(variables)
    weights = {"LARS/iter:0": np.int64(7)}
    for name, value in zip(NAMES, arrays(1), strict=True):
        weights[f"LARS/{name}/momentum:0"] = value
    load_optimizer_state(lars, write(weights))
    assert_equal(lars.momentums, arrays(1))


def test_missing_scale_is_reset_with_warning_at_caller(write, variables):
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=64)
    optimizer.build(variables)
    optimizer.dynamic_scale.assign(2.0)
    with pytest.warns(UserWarning, match="starts at initial_scale=64") as record:
        load_optimizer_state(optimizer, write(new_adam()))
    assert __file__ in [r.filename for r in record if r.category is UserWarning]
    assert float(optimizer.loss_scale) == 64
    assert_is_loaded(optimizer.inner_optimizer)


def test_float16_slots_load_into_float32_slots(write, variables):
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    load_optimizer_state(optimizer, write(legacy_adam(dtype="float16")))
    expected = [a.astype("float16").astype("float32") for a in arrays(1)]
    assert_equal(optimizer._momentums, expected)


# --- Which name belongs to which path ---------------------------------------


@pytest.mark.parametrize(
    "names, paths, order",
    [
        # As they are, behind the model's name.
        (["a/kernel", "b/kernel"], ["model/b/kernel", "model/a/kernel"], [1, 0]),
        (["a/kernel:0", "b/kernel:0"], ["b/kernel", "a/kernel"], [1, 0]),
        (["m/x/d/k", "m/y/d/k"], ["n/y/d/k", "n/x/d/k"], [1, 0]),
        # Numbered anew: `dense_1` is the second in the file and the first here.
        (["dense/k", "dense_1/k"], ["dense_1/k", "dense_2/k"], [0, 1]),
        (
            ["dense_1/k", "in/k", "dense/k"],
            ["dense_8/k", "dense_9/k", "in/k"],
            [0, 2, 1],
        ),
        (["bn/gamma", "bn/beta"], ["bn_3/beta", "bn_3/gamma"], [1, 0]),
        # The same names in two parts of a model: the first is the first.
        (["x/d/k", "y/d/k"], ["a/d/k", "b/d/k"], [0, 1]),
        # Renamed layers, renamed variables.
        (["a/kernel", "a/bias"], ["b/bias", "b/kernel"], [1, 0]),
        (["a/w", "a/x"], ["b/kernel", "b/bias"], [0, 1]),
        (["Variable"], ["variable_7"], [0]),
        ([None, None], ["b/kernel", "a/kernel"], [0, 1]),
        ([], [], []),
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


# --- What is refused --------------------------------------------------------


def test_unbuilt_optimizer_is_rejected(write):
    inner = keras.optimizers.Adam()
    for optimizer in (inner, keras_lso.LossScaleOptimizer(inner)):
        with pytest.raises(
            ValueError, match=r"optimizer\.build\(model\.trainable_variables\)` first"
        ):
            load_optimizer_state(optimizer, write(new_adam()))


def test_optimizer_of_wrong_type_is_rejected(write):
    with pytest.raises(TypeError, match="`optimizer` must be.*optimizer='adam'"):
        load_optimizer_state("adam", write(new_adam()))


@pytest.mark.parametrize("name", ["missing.h5", "missing.keras", "missing"])
def test_missing_path_raises_file_not_found_error(name, adam, tmp_path):
    assert_refused(adam, tmp_path / name, name, FileNotFoundError)


@pytest.mark.parametrize("content", [b"", b"garbage" * 100])
def test_garbage_file_is_rejected(content, adam, tmp_path):
    path = tmp_path / "model.h5"
    path.write_bytes(content)
    assert_refused(adam, path, "neither an HDF5 file.*model.h5")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_files_are_rejected(share, adam, write, write_archive):
    for path in (write(new_adam()), write_archive(new_adam().values())):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        assert_refused(adam, path, "damaged")


def test_files_with_missing_or_broken_parts_are_rejected(adam, write, write_archive):
    path = write(new_adam())
    with h5py.File(path, "r+") as file:
        del file["optimizer_weights/Adam/v/dense/kernel:0"]
    assert_refused(adam, path, "damaged")
    path = write(new_adam(), config={"class_name": "Adam", "config": {}})
    with h5py.File(path, "r+") as file:
        file.attrs["training_config"] = b"{not json"
    assert_refused(adam, path, "Nothing was loaded")
    path = write_archive([])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", b"garbage")
    assert_refused(adam, path, "damaged")


def test_files_without_optimizer_state_are_rejected(adam, write, tmp_path):
    path = tmp_path / "weights.h5"
    with h5py.File(path, "w") as file:
        file["dense/kernel:0"] = np.zeros(3)
    assert_refused(adam, path, "holds no optimizer state")
    assert_refused(adam, write({}), "holds no optimizer state")
    assert_refused(adam, write({"Adam/iter:0": np.int64(0)}), "before the first step")


@pytest.mark.parametrize("version", ["3.0.0", "3.15.1"])
def test_files_of_keras_3_are_rejected(version, adam, write, write_archive):
    for path in (
        write(new_adam(), version=version),
        write_archive(new_adam().values(), version=version),
    ):
        assert_refused(adam, path, rf"Keras {version}.*keras_lso\.load_model\(path\)")


def test_weights_file_of_keras_3_is_recognized_by_learning_rate(adam, tmp_path):
    path = tmp_path / "model.weights.h5"
    step, *slots = new_adam().values()
    with h5py.File(path, "w") as file:
        for i, value in enumerate([step, np.float32(0.1), *slots]):
            file[f"optimizer/vars/{i}"] = value
    assert_refused(adam, path, r"Keras 3.*keras_lso\.load_model")


@pytest.mark.parametrize(
    "change, match",
    [
        ({"Adam/dense/bias/v:0": None}, r"slot 'v' of 2 variables.*built for 3"),
        ({"Adam/dense_2/bias/v:0": np.ones(3)}, r"slot 'v' of 4 variables"),
        (
            {"Adam/dense/bias/v:0": np.ones(4, "float32")},
            r"slot 'v' of '.*dense/bias' has shape \(3,\).*shape \(4,\)",
        ),
        ({"Adam/dense/bias/v:0": np.ones(3, "float64")}, "dtype float32.*float64"),
        ({"Adam/dense/bias/v:0": np.ones(3, "int32")}, "dtype float32.*int32"),
        ({"Adam/dense/bias/v:0": np.array([b"x"] * 3)}, "dtype float32"),
        ({"Adam/iter:0": np.float32(7)}, "iterations must be an integer"),
        ({"Adam/iter:0": np.int64(-1)}, "iterations must be an integer"),
        ({"Adam/iter:0": np.int64([7])}, "iterations must be an integer"),
    ],
)
def test_wrong_counts_shapes_and_dtypes_are_rejected(change, match, adam, write):
    weights = {**legacy_adam(), **change}
    weights = {name: value for name, value in weights.items() if value is not None}
    assert_refused(adam, write(weights), match)


def test_more_iterations_than_int32_holds_are_rejected(adam, write):
    dtype = keras.backend.standardize_dtype(adam.iterations.dtype)
    largest = int(np.iinfo(dtype).max)
    load_optimizer_state(adam, write(legacy_adam(iterations=largest)))
    assert int(adam.iterations) == largest
    if dtype == "int32":
        path = write(legacy_adam(iterations=largest + 1))
        assert_refused(adam, path, "too many iterations")


def test_wrong_counts_or_shapes_without_names_are_rejected(adam, write_archive):
    values = list(new_adam().values())
    assert_refused(adam, write_archive(values[:-1]), "holds 5 slot variables.*make 6")
    assert_refused(adam, write_archive([values[0], *values[:0:-1]]), "has shape")


@pytest.mark.parametrize(
    "optimizer, match",
    [
        (lambda: keras.optimizers.SGD(0.1), r"file: \['m', 'v'\]"),
        (lambda: keras.optimizers.Adam(amsgrad=True), r"optimizer: \['vhat'\]"),
        (lambda: keras.optimizers.Adam(use_ema=True), r"optimizer: \['average'\]"),
        (lambda: keras.optimizers.Lion(), r"file: \['v'\]"),
    ],
)
def test_slots_of_different_optimizer_are_rejected(optimizer, match, variables, write):
    optimizer = optimizer()
    optimizer.build(variables)
    assert_refused(optimizer, write(legacy_adam()), match)


def test_state_of_other_class_with_same_slots_is_rejected_unless_adamw(
    variables, write
):
    config = {"class_name": "Adam", "config": {}}
    optimizer = keras.optimizers.Adamax()
    optimizer.build(variables)
    assert_refused(
        optimizer, write(legacy_adam(), config), "state of Adam, but .* is Adamax"
    )
    optimizer = keras.optimizers.AdamW()
    optimizer.build(variables)
    load_optimizer_state(optimizer, write(legacy_adam(), config))
    assert_is_loaded(optimizer)


def test_state_for_adafactor_is_rejected(variables, write):
    optimizer = keras.optimizers.Adafactor()
    optimizer.build(variables)
    assert_refused(optimizer, write({"Adafactor/iter:0": np.int64(3)}), "optimizer")


def test_unknown_weights_are_rejected(adam, write):
    weights = {**new_adam(), "Adam/lookahead/dense/kernel:0": np.ones((2, 3))}
    assert_refused(adam, write(weights), "no place here: 'Adam/lookahead/dense/kernel'")


@pytest.mark.parametrize(
    "module, make, match",
    [
        ("h5py", "model.h5", "pip install h5py"),
        ("tensorflow", "checkpoint.index", "pip install tensorflow.*`.h5`"),
    ],
)
def test_error_names_package_to_install(
    module, make, match, adam, tmp_path, monkeypatch
):
    path = tmp_path / make
    path.write_bytes(b"x")
    imported = builtins.__import__

    def import_(name, *args, **kwargs):
        if name.split(".")[0] == module:
            raise ImportError(f"No module named '{name}'")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_)
    assert_refused(adam, path, match, ImportError)
