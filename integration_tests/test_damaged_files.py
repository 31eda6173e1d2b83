"""Damaged and hostile files and configs, one test a format.

Each is rejected with a clear error, or loads soundly: no NaN, and a loss scale within
its bounds. Nothing that a config names is imported or run.
"""

import copy
import io
import json
import random
import sys
import types
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LARS, LossScaleOptimizer, loss_scales, schedules
from keras_lso.mixed_precision import load_optimizer_state
from testing.harness import bits

REJECTIONS = (ValueError, TypeError, OSError)
# Errors of Keras's `load_weights` as well, if h5py cannot read a file.
OF_KERAS = (*REJECTIONS, RuntimeError, LookupError)


def attempt(load, label, allowed=REJECTIONS):
    """Returns what `load` returns; None if it raises a clear error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return load()
        except Exception as error:
            assert isinstance(error, allowed), f"{label}: {error!r}"
            assert len(str(error)) > 25, f"{label}: {error!r}"
            return None


def assert_sound(optimizer, label):
    policy, scale = optimizer.loss_scale_policy, float(optimizer.loss_scale)
    assert policy.min_scale <= scale <= policy.max_scale, label
    values = [np.asarray(ops.convert_to_numpy(v)) for v in optimizer.variables]
    assert not any(np.isnan(v).any() for v in values), label


def make_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    inner = keras.optimizers.SGD(0.5, momentum=0.5)
    model.compile(LossScaleOptimizer(inner, max_scale=2.0**20), loss="mse")
    model.optimizer.build(model.trainable_variables)
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
        file.attrs["training_config"] = json.dumps({"optimizer_config": config})
        group = file.create_group("optimizer_weights")
        group.attrs["weight_names"] = [name.encode() for name in weights]
        for name, value in weights.items():
            group[name] = value
    return stream.getvalue()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Bytes of good files by name, and the model and optimizer that load them."""
    folder = tmp_path_factory.mktemp("good")
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for save, name in (
            (model.save, "model.keras"),
            (model.save, "model.h5"),
            (model.save_weights, "model.weights.h5"),
        ):
            save(folder / name)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["of_tf_keras.h5"] = tf_keras_file()
    adam = LossScaleOptimizer(keras.optimizers.Adam(0.25), initial_scale=64.0)
    adam.build(make_model().trainable_variables)
    return types.SimpleNamespace(files=files, model=model, adam=adam)


def load(name, path, good, label):
    """Loads a file, and checks that it is rejected or sound."""
    if name in ("model.keras", "model.h5"):
        model = attempt(lambda: keras_lso.load_model(path), label)
        if isinstance(getattr(model, "optimizer", None), LossScaleOptimizer):
            assert_sound(model.optimizer, label)
        return model is not None
    if name == "of_tf_keras.h5":
        optimizer, allowed = good.adam, REJECTIONS
        run = lambda: load_optimizer_state(optimizer, path) or True  # noqa: E731
    else:
        optimizer, allowed = good.model.optimizer, OF_KERAS
        run = lambda: good.model.load_weights(path) or True  # noqa: E731
    for variable in optimizer.variables:
        variable.assign(np.full(variable.shape, 3))
    before = bits(optimizer.variables)
    is_loaded = bool(attempt(run, label, allowed))
    if bits(optimizer.variables) != before:
        # Keras may find damage in a layer after it has loaded the optimizer.
        assert is_loaded or name == "model.weights.h5", label
        assert_sound(optimizer, label)
    return is_loaded


def damaged_bytes(data):
    """Yields copies of a file that end too early, and copies with wrong bytes."""
    numbers = random.Random(1)
    for _ in range(6):
        end = numbers.randrange(len(data))
        yield f"the first {end} bytes", data[:end]
    for _ in range(20):
        copied = bytearray(data)
        for _ in range(numbers.choice((1, 16))):
            copied[numbers.randrange(len(data))] ^= numbers.randrange(1, 256)
        yield "other bytes", bytes(copied)


WEIGHTS = "model.weights.h5"
# The group with the state of the optimizer, and the names of arrays in it.
GROUPS = {
    "model.weights.h5": ("optimizer/vars", ("0", "3", "6")),
    "model.h5": (
        "optimizer_weights",
        ("loss_scale_optimizer/iteration", "loss_scale_optimizer/dynamic_scale"),
    ),
    "of_tf_keras.h5": ("optimizer_weights", ("Adam/iter:0", "Adam/dense/kernel/m:0")),
}
WRONG_ARRAYS = {
    "missing": lambda good: None,
    "another rank": lambda good: good[None],
    "words": lambda good: np.full(good.shape, b"x" * 8),
    "NaN": lambda good: np.full(good.shape, np.nan, "float32"),
    "-1": lambda good: np.full(good.shape, -1, good.dtype),
    "1e300": lambda good: np.full(good.shape, 1e300),
}


def wrong_arrays(name, data):
    """Yields copies of an HDF5 file with one wrong array."""
    group, names = GROUPS[name]
    for path in (f"{group}/{each}" for each in names):
        for label, wrong in WRONG_ARRAYS.items():
            stream = io.BytesIO(data)
            with h5py.File(stream, "r+") as file:
                value = wrong(np.asarray(file[path][()]))
                del file[path]
                if value is not None:
                    file[path] = value
            yield f"{path}: {label}", stream.getvalue()


def archives(data):
    """Yields copies of a `.keras` file with one wrong member."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    weights = members[WEIGHTS]
    for name, content in (
        ("config.json", None),
        ("config.json", b"[1, 2]"),
        ("config.json", b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
        ("model.weights.h5", None),
        ("model.weights.h5", b"PK" * 100),
        *((WEIGHTS, wrong) for _, wrong in wrong_arrays(WEIGHTS, weights)),
    ):
        changed = {k: v for k, v in members.items() if k != name}
        changed |= {} if content is None else {name: content}
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for member, value in changed.items():
                archive.writestr(member, value)
        yield f"{name}: {str(content)[:9]}", stream.getvalue()


@pytest.mark.parametrize("name", ["model.keras", *GROUPS])
def test_damaged_file_is_rejected_or_loads_soundly(name, good, tmp_path):
    path, data = tmp_path / name, good.files[name]
    path.write_bytes(data)
    assert load(name, path, good, "undamaged")
    changed = archives(data) if name == "model.keras" else wrong_arrays(name, data)
    rejected = 0
    for label, wrong in (*damaged_bytes(data), *changed):
        path.write_bytes(wrong)
        rejected += not load(name, path, good, label)
    assert rejected >= 12


WRONG_VALUES = [None, "x", True, [], {}, -1, 0.5, 2**63, 10**400, np.nan, np.inf]


def good_config():
    warmup = schedules.LinearWarmup(schedules.JoinedSchedules([0.5, 0.25], [3]), 4)
    policy = loss_scales.DynamicLossScale(64.0, 3, growth_factor=1.5, hysteresis=2)
    optimizer = LossScaleOptimizer(LARS(warmup), loss_scale=policy)
    return json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))


def paths_in(config, prefix=()):
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_in(value, (*prefix, key))


def changed(config, path, value):
    config = copy.deepcopy(config)
    parent = config
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = copy.deepcopy(value)
    return config


def test_config_with_wrong_value_is_rejected_or_gives_sound_optimizer():
    config, rejected = good_config(), 0
    for path in paths_in(config):
        for value in WRONG_VALUES:
            label = f"{'.'.join(path)} is {str(value)[:9]}"
            broken = changed(config, path, value)
            optimizer = attempt(lambda c=broken: keras_lso.deserialize(c), label)
            rejected += optimizer is None
            if isinstance(optimizer, LossScaleOptimizer):
                optimizer.build([keras.Variable(np.ones((3, 2), "float32"))])
                assert_sound(optimizer, label)
    assert rejected > 200


@pytest.mark.parametrize("load", [keras.saving.load_model, keras_lso.load_model])
@pytest.mark.parametrize("path", ["inner_optimizer", "loss_scale"])
def test_foreign_object_in_config_is_rejected_without_running_code(
    load, path, tmp_path, monkeypatch
):
    sentinel = tmp_path / "code-has-run"
    module = tmp_path / "damage_sentinel.py"
    module.write_text(f"open({str(sentinel)!r}, 'w')\nclass Optimizer: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    objects = [
        ("os", "system", {"command": f"touch {sentinel}"}),
        ("builtins", "exec", {"source": f"open({str(sentinel)!r}, 'w')"}),
        ("damage_sentinel", "Optimizer", {}),
        ("keras_lso.damage_sentinel", "LARS", {}),
        ("keras.layers", "Dense", {"units": 2}),
        ("keras.optimizers", "Newton", {}),
        ("builtins", "__lambda__", {"value": ["", None, None]}),
    ]
    model = make_model()
    for module, name, arguments in objects:
        foreign = {"module": module, "class_name": name, "config": arguments}
        foreign["registered_name"] = name
        broken = changed(good_config(), ("config", path), foreign)
        assert attempt(lambda c=broken: keras_lso.deserialize(c), name) is None
        file = tmp_path / "model.keras"
        model.save(file)
        with zipfile.ZipFile(file) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        config = json.loads(members["config.json"])
        config["compile_config"]["optimizer"] = broken
        members["config.json"] = json.dumps(config)
        with zipfile.ZipFile(file, "w") as archive:
            for member, value in members.items():
                archive.writestr(member, value)
        assert attempt(lambda f=file: load(f), name) is None
    assert not sentinel.exists()
    assert not any("damage_sentinel" in name for name in sys.modules)


def test_recursive_or_too_deeply_nested_config_is_rejected():
    cyclic = good_config()
    cyclic["config"]["inner_optimizer"] = cyclic
    twice = changed(good_config(), ("config", "inner_optimizer"), good_config())
    deep = {}
    for _ in range(10**5):
        deep = {"class_name": "SGD", "config": deep}
    for config, words in (
        (cyclic, "contains itself"),
        (twice, "must not be a LossScaleOptimizer"),
        (deep, "nested too deeply"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            keras_lso.deserialize(config)
