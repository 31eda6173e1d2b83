"""Damaged and hostile files: refused with a clear error, or loaded into a sane state.

Every file and config here was good once and has one thing wrong. A loader may refuse
it, with an error that says something. Or it takes it, and leaves an optimizer whose
scale lies within its bounds and that trains on. Nothing that a file names is ever run.
"""

import contextlib
import copy
import io
import json
import random
import sys
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.saved_models import (
    assert_same,
    built_model,
    momentum_sgd,
    trained_model,
)
from keras_lso import LARC, LARS, LossScaleOptimizer, loss_scales
from keras_lso._keras_internals.optimizers import variables_of
from keras_lso.mixed_precision import load_optimizer_state

REFUSALS = (ValueError, TypeError, OSError)
# What h5py says in Keras's `load_weights` to a file that it cannot find its way in.
REFUSALS_OF_H5PY = (*REFUSALS, RuntimeError, LookupError)
WRONG_VALUES = [None, "x", [1.0], -1, 10**400, float("nan"), float("inf")]


@contextlib.contextmanager
def quietly():
    """Keras and we warn of what is skipped; that is no error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def attempt(load, label, allowed=REFUSALS):
    """Returns what `load` returns; None if it refuses as it should."""
    with quietly():
        try:
            return load()
        except allowed as error:
            assert len(str(error)) > 25, label
            return None


def bits(variables):
    return [np.array(ops.convert_to_numpy(v)).tobytes() for v in variables]


def assert_sane(optimizer, label):
    """The built optimizer is as sound as one that nobody has damaged."""
    variables = variables_of(optimizer)
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    policy = optimizer.loss_scale_policy
    # An overflow must not reach a weight.
    for _ in range(2):
        scale = float(ops.convert_to_numpy(optimizer.loss_scale))
        assert policy.min_scale <= scale <= policy.max_scale, label
        grads = [ops.full(v.shape, float("inf")) for v in variables]
        optimizer.apply(grads, variables, scaled=True)
        for variable in variables:
            assert (ops.convert_to_numpy(variable) == 1.0).all(), label


# --- Bytes and arrays ---------------------------------------------------------------


def make_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    inner = keras.optimizers.SGD(0.5, momentum=0.5)
    optimizer = LossScaleOptimizer(inner, min_scale=2.0, max_scale=2.0**20)
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return model


def tf_keras_file(path):
    """Writes what `model.save("model.h5")` writes in tf.keras, of a legacy Adam."""
    config = {"class_name": "Adam", "config": {"learning_rate": 0.5, "decay": 0.0}}
    weights = {"Adam/iter:0": np.int64(7)}
    for slot in "mv":
        for name, shape in (("kernel", (3, 2)), ("bias", (2,))):
            weights[f"Adam/dense/{name}/{slot}:0"] = np.full(shape, 0.5, "float32")
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.12.0"
        file.attrs["training_config"] = json.dumps({"optimizer_config": config})
        group = file.create_group("optimizer_weights")
        group.attrs["weight_names"] = [name.encode() for name in weights]
        for name, value in weights.items():
            group[name] = value


def load_model(path):
    optimizer = getattr(keras_lso.load_model(path), "optimizer", None)
    return optimizer if isinstance(optimizer, LossScaleOptimizer) else None


def load_weights(path):
    model = make_model()
    model.load_weights(path)
    return model.optimizer


def load_tf_keras(path):
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.25), initial_scale=64.0)
    optimizer.build(make_model().trainable_variables)
    before = bits(optimizer.variables)
    try:
        load_optimizer_state(optimizer, path)
    except Exception:
        assert bits(optimizer.variables) == before
        raise
    return optimizer


FORMATS = {
    "model.keras": (lambda path: make_model().save(path), load_model),
    "old_model.h5": (lambda path: make_model().save(path), load_model),
    "a.weights.h5": (lambda path: make_model().save_weights(path), load_weights),
    "tf_keras.h5": (tf_keras_file, load_tf_keras),
}


@pytest.mark.parametrize("name", FORMATS)
def test_file_with_damaged_bytes_is_rejected_or_loads_sanely(name, tmp_path):
    save, load = FORMATS[name]
    path, numbers = tmp_path / name, random.Random(1)
    with quietly():
        save(path)
    good = path.read_bytes()
    assert load(path) is not None
    for number in range(30):
        damaged = bytearray(good)
        if number < 10:
            damaged = damaged[: numbers.randrange(len(good))]
        for _ in range(number % 10 + 1 if number >= 10 else 0):
            damaged[numbers.randrange(len(good))] ^= numbers.randrange(1, 256)
        path.write_bytes(damaged)
        optimizer = attempt(lambda: load(path), number, REFUSALS_OF_H5PY)
        if optimizer is not None:
            optimizer.build(optimizer._trainable_variables or [keras.Variable([1.0])])
            with quietly():
                assert_sane(optimizer, number)


def test_weights_file_with_wrong_array_is_rejected_or_loads_sanely(tmp_path):
    path = tmp_path / "a.weights.h5"
    make_model().save_weights(path)
    good = path.read_bytes()
    with h5py.File(io.BytesIO(good)) as file:
        arrays = {name: array[()] for name, array in file["optimizer/vars"].items()}
    for index, array in arrays.items():
        for wrong in (array[None], np.full(array.shape, b"x"), array * np.nan):
            stream = io.BytesIO(good)
            with h5py.File(stream, "r+") as file:
                del file[f"optimizer/vars/{index}"]
                file[f"optimizer/vars/{index}"] = wrong
            path.write_bytes(stream.getvalue())
            label = f"{index}: {wrong!r}"
            made = attempt(lambda: load_weights(path), label, REFUSALS_OF_H5PY)
            if made is not None:
                assert_sane(made, label)


def shorten_a_slot(variables):
    shape = variables["6"].shape
    del variables["6"]
    variables["6"] = np.zeros((shape[0] - 1, *shape[1:]), "float32")


def lengthen_the_scale(variables):
    del variables["3"]
    variables["3"] = np.full(2, 64, "float32")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shorten_a_slot, "shape"),
        (lengthen_the_scale, "shape"),
        (lambda variables: variables.move("3", "33"), "'3'"),
    ],
)
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


def test_file_with_more_variables_is_skipped_with_warning(tmp_path):
    path = tmp_path / "model.weights.h5"
    trained_model().save_weights(path)
    other = built_model(LossScaleOptimizer(keras.optimizers.SGD()))
    before = [v.numpy() for v in other.optimizer.variables]
    with pytest.warns(UserWarning, match="has 6 variables .* optimizer has 10"):
        other.load_weights(path)
    assert_same([v.numpy() for v in other.optimizer.variables], before)


# --- Configs ------------------------------------------------------------------------

OPTIMIZERS = {
    "bounds": lambda: LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5), min_scale=2.0, max_scale=2.0**20
    ),
    "policy": lambda: LossScaleOptimizer(
        LARC(LARS(0.5)), loss_scale=loss_scales.DynamicLossScale(64.0, hysteresis=2)
    ),
}


def config_of(kind):
    config = keras.saving.serialize_keras_object(OPTIMIZERS[kind]())
    return json.loads(json.dumps(config))


def paths_in(config, prefix=()):
    """Yields the paths of all keys of a nested dict."""
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_in(value, (*prefix, key))


def put(config, path, value):
    """Returns a copy that has a value at a path."""
    config = copy.deepcopy(config)
    parent = config
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = copy.deepcopy(value)
    return config


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_config_with_wrong_value_is_rejected_or_gives_sane_optimizer(kind):
    config, of_keras = config_of(kind), keras.optimizers.SGD(0.5).get_config()
    paths = [p for p in paths_in(config) if p[-1] not in of_keras or "name" in p[-1]]
    accepted = 0
    for path in paths:
        for value in WRONG_VALUES:
            broken = put(config, path, value)
            label = f"{'.'.join(path)}: {value!r:.9}"
            made = attempt(lambda c=broken: keras_lso.deserialize(c), label)
            if isinstance(made, LossScaleOptimizer):
                accepted += 1
                made.build([keras.Variable(np.ones((3, 2), "float32"))])
                with quietly():
                    assert_sane(made, label)
    assert 0 < accepted < len(paths) * len(WRONG_VALUES) / 2


@pytest.fixture
def sentinel(tmp_path, monkeypatch):
    """A file that exists once a config's code has run, or its module was imported."""
    path = tmp_path / "code-has-run"
    module = tmp_path / "damage_sentinel.py"
    module.write_text(f"open({str(path)!r}, 'w')\nclass Optimizer: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    assert not path.exists(), "what a config names was run"
    assert not any("damage_sentinel" in name for name in sys.modules)


def lambda_(source):
    """What Keras writes for a Python lambda; the code is run when it is called."""
    from keras.src.utils import python_utils

    function = eval(f"lambda *args, **kwargs: {source}")
    code, defaults, closure = python_utils.func_dump(function)
    value = [code, defaults, closure]
    return {"class_name": "__lambda__", "config": {"value": value}}


def foreign_objects(sentinel):
    """Yields dicts that describe no optimizer, some of which would run code."""
    python = f"open({str(sentinel)!r}, 'w')"
    for module, name, config in (
        ("os", "system", {"command": f"touch {sentinel}"}),
        ("builtins", "eval", {"source": python}),
        ("keras.config", "enable_unsafe_deserialization", {}),
        ("damage_sentinel", "Optimizer", {}),
        ("keras_lso.damage_sentinel", "LARS", {}),
        ("keras.layers", "Dense", {"units": 2}),
        ("keras.optimizers", "Newton", {}),
    ):
        names = {"module": module, "registered_name": name}
        yield {**names, "class_name": name, "config": config}
        yield {**names, "class_name": "function", "config": name}
    yield lambda_(python)


def with_optimizer(path, config):
    """Writes a model file that describes its optimizer by a config."""
    make_model().save(path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    changed = json.loads(contents["config.json"])
    changed["compile_config"]["optimizer"] = config
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (contents | {"config.json": json.dumps(changed)}).items():
            archive.writestr(name, content)


@pytest.mark.parametrize("key", ["inner_optimizer", "loss_scale"])
def test_foreign_object_in_config_is_rejected_without_running_code(
    key, sentinel, tmp_path
):
    config = config_of("policy")
    for foreign in foreign_objects(sentinel):
        broken = put(config, ("config", key), foreign)
        with_optimizer(tmp_path / "model.keras", broken)
        for load in (
            lambda c=foreign: keras_lso.deserialize(c),
            lambda c=broken: keras_lso.deserialize(copy.deepcopy(c)),
            lambda c=broken: keras.saving.deserialize_keras_object(copy.deepcopy(c)),
            lambda: keras_lso.load_model(tmp_path / "model.keras"),
            lambda: keras.saving.load_model(tmp_path / "model.keras"),
        ):
            assert attempt(load, foreign) is None, foreign
            assert not sentinel.exists(), foreign


@pytest.mark.parametrize("load", [keras.saving.load_model, keras_lso.load_model])
def test_lambda_in_config_loads_only_without_safe_mode(load, sentinel, tmp_path):
    rate = "config", "inner_optimizer", "config", "learning_rate"
    with_optimizer(tmp_path / "m.keras", put(config_of("bounds"), rate, lambda_("0.5")))
    with pytest.raises(ValueError, match="Python lambda"):
        load(tmp_path / "m.keras")
    with quietly():
        model = load(tmp_path / "m.keras", safe_mode=False)
    assert model.optimizer.learning_rate == 0.5


def test_load_model_without_compile_ignores_broken_optimizer_config(tmp_path):
    """`compile=False` is the way out that the errors name."""
    broken = {"class_name": "LossScaleOptimizer", "config": {"optimizer": 3}}
    with_optimizer(tmp_path / "model.keras", broken)
    with pytest.raises(ValueError, match="loss_scale"):
        keras_lso.load_model(tmp_path / "model.keras")
    assert keras_lso.load_model(tmp_path / "model.keras", compile=False).get_weights()
