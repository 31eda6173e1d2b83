"""Damaged and hostile configs: refused with a clear error, or made into what works.

Each config was good once and has one thing wrong: a key is missing, or holds what does
not belong there. They go through JSON, as in a file, or through a `.keras` file. An
argument of ours that is wrong is refused by its name. Nothing that a config names is
ever imported or run.
"""

import copy
import functools
import json
import sys

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests import damage
from integration_tests.damage_verdicts import (
    assert_clear,
    assert_sane,
    attempt,
    quietly,
)
from keras_lso import (
    LAMB,
    LARC,
    LARS,
    LossScaleOptimizer,
    NovoGrad,
    loss_scales,
    schedules,
)

# What reads a config, and what refuses one, is the same on every backend.
pytestmark = pytest.mark.default_backend("torch")

# For each test the least number of files, of which an empty loop has none.
FEWEST = {
    "test_file_with_wrong_config_value_is_rejected_or_loads_sanely": 30,
    "test_file_naming_foreign_object_is_rejected_by_load_model": 120,
}
LOADED = []


@pytest.fixture(autouse=True)
def enough_files(request):
    """Fails a test that has loaded fewer files than it should."""
    LOADED.clear()
    yield
    assert len(LOADED) >= FEWEST.get(request.node.originalname, 0)


# --- Good configs -------------------------------------------------------------


def warmup():
    return schedules.LinearWarmup(schedules.JoinedSchedules([0.5, 0.25], [3]), 4)


OPTIMIZERS = {
    "bounds": lambda: LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5), min_scale=2.0, max_scale=2.0**20
    ),
    "policy": lambda: LossScaleOptimizer(
        LARS(warmup()),
        loss_scale=loss_scales.DynamicLossScale(
            64.0, 3, growth_factor=1.5, backoff_factor=0.25, hysteresis=2
        ),
        master_weights=False,
    ),
    "LogMax": lambda: LossScaleOptimizer(
        LARC(NovoGrad(0.5)), loss_scale=loss_scales.LogMaxLossScale()
    ),
}
# What TensorFlow 2.0 to 2.3 wrote.
OLD = {
    "class_name": "LossScaleOptimizer",
    "config": {
        "optimizer": {
            "class_name": "SGD",
            "config": {"lr": 0.5, "decay": 0.25, "momentum": 0.5},
        },
        "loss_scale": {
            "class_name": "DynamicLossScale",
            "config": {"initial_loss_scale": 64, "increment_period": 3},
        },
    },
}


def through_json(config):
    return json.loads(json.dumps(config))


def good_config(kind):
    if kind == "old":
        return copy.deepcopy(OLD)
    return through_json(keras.saving.serialize_keras_object(OPTIMIZERS[kind]()))


def build(optimizer):
    optimizer.build([keras.Variable(np.ones((3, 2), "float32"))])
    return optimizer


@functools.cache
def good_file(folder):
    """The bytes of a `.keras` file."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(OPTIMIZERS["bounds"](), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.save(folder / "good.keras")
    return (folder / "good.keras").read_bytes()


@pytest.fixture
def load_with(tmp_path_factory, tmp_path):
    """`load_with(config, load)`: a model whose file describes its optimizer so."""
    data = good_file(tmp_path_factory.getbasetemp())

    def load_with(optimizer, load=keras_lso.load_model, **options):
        def change(config):
            config["compile_config"]["optimizer"] = optimizer
            return config

        path = tmp_path / "model.keras"
        path.write_bytes(damage.with_config(data, change))
        LOADED.append(path)
        return load(path, **options)

    return load_with


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


# --- Wrong values -------------------------------------------------------------


def names_of(path):
    """Returns the words by which the error for a damaged argument may call it."""
    key = path[-1]
    if key in ("class_name", "module", "registered_name", "config", "name"):
        # Keras's own, for which it has other words.
        return []
    # tf.keras had a short name, too.
    more = {"lr": ["learning_rate"], "loss_scale": ["loss-scale", "loss scale"]}
    return [key, *more.get(key, [])]


def paths_of_keras(kind):
    """Paths of what only Keras looks at: the arguments of every Keras optimizer."""
    known = keras.optimizers.SGD(0.5).get_config()
    return {
        path
        for path in damage.paths_in(good_config(kind))
        if path[-1] in known and path[-1] not in ("learning_rate", "name")
    }


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "old"])
def test_config_with_wrong_value_is_rejected_or_gives_sane_optimizer(kind):
    config = good_config(kind)
    skipped = paths_of_keras(kind)
    paths = [p for p in damage.paths_in(config) if p not in skipped]
    accepted = []
    # The others have many more arguments, each accepted value of which takes steps.
    is_small = kind in ("bounds", "old")
    values = damage.WRONG_VALUES if is_small else damage.FEW_VALUES
    for label, path, broken in damage.damaged_values(config, paths, values):
        names = names_of(path)
        optimizer = attempt(
            lambda c=broken: keras_lso.deserialize(through_json(c)), label, names
        )
        if optimizer is None:
            continue
        accepted.append(label)
        if isinstance(optimizer, LossScaleOptimizer):
            with quietly():
                assert_sane(build(optimizer), label)
        else:
            assert isinstance(optimizer, keras.optimizers.Optimizer), label
    # Without a scale, say, it is the default. Numbers and names are most of the rest.
    assert 0 < len(accepted) < len(paths) * len(values) / 2


@pytest.mark.parametrize("key", sorted(p[-1] for p in paths_of_keras("bounds")))
def test_unchecked_keras_arguments_never_make_weights_non_finite(key):
    """Refused at once, or at the first step; in no case is a weight not finite."""
    path = ("config", "inner_optimizer", "config", key)
    config = good_config("bounds")
    for label, _, broken in damage.damaged_values(config, [path]):
        optimizer = attempt(lambda c=broken: keras_lso.deserialize(c), label)
        if optimizer is None:
            continue
        [variable] = build(optimizer)._trainable_variables
        with quietly():
            for _ in range(2):
                try:
                    grads = keras.ops.ones((3, 2)) * optimizer.loss_scale
                    optimizer.apply([grads], [variable], scaled=True)
                except Exception as error:
                    assert len(str(error)) > 10, label
        assert np.isfinite(keras.ops.convert_to_numpy(variable)).all(), label


@pytest.mark.parametrize(
    "load", [keras.saving.load_model, keras_lso.load_model], ids=["keras", "keras_lso"]
)
def test_file_with_wrong_config_value_is_rejected_or_loads_sanely(load, load_with):
    config = good_config("bounds")
    paths = [("config", key) for key in config["config"]]
    values = {k: damage.WRONG_VALUES[k] for k in ("a word", "NaN", "a long integer")}
    for label, path, broken in damage.damaged_values(config, paths, values):
        names = names_of(path)
        model = attempt(lambda c=broken: load_with(c, load), label, names)
        if model is not None and model.optimizer is not None:
            with quietly():
                assert_sane(model.optimizer, label)


# --- Objects that are none, and code ------------------------------------------

PLACES = {
    "inner_optimizer": ("policy", ("config", "inner_optimizer")),
    "learning_rate": (
        "policy",
        ("config", "inner_optimizer", "config", "learning_rate"),
    ),
    "loss_scale": ("policy", ("config", "loss_scale")),
    "inside of LARC": (
        "LogMax",
        ("config", "inner_optimizer", "config", "inner_optimizer"),
    ),
}
# `{"class_name": "SGD"}` is short for an SGD with its defaults.
COMPLETE = {"inner_optimizer", "optimizer"}


@pytest.mark.parametrize("place", PLACES)
def test_foreign_object_in_config_is_rejected_without_running_code(place, sentinel):
    kind, path = PLACES[place]
    config = good_config(kind)
    for label, foreign in damage.foreign_objects(sentinel):
        broken = damage.changed(config, path, damage.put(foreign))
        for read in (keras_lso.deserialize, keras.saving.deserialize_keras_object):
            made = attempt(lambda c=broken, r=read: r(copy.deepcopy(c)), label)
            assert made is None or label == "no config", label
            assert not sentinel.exists(), label


def test_deserialize_rejects_config_of_foreign_object(sentinel):
    for label, foreign in damage.foreign_objects(sentinel):
        made = attempt(lambda c=foreign: keras_lso.deserialize(c), label)
        assert made is None or label == "no config", label


@pytest.mark.parametrize(
    "load", [keras.saving.load_model, keras_lso.load_model], ids=["keras", "keras_lso"]
)
def test_file_naming_foreign_object_is_rejected_by_load_model(
    load, load_with, sentinel
):
    config = good_config("bounds")
    for label, foreign in damage.foreign_objects(sentinel):
        for key in ("inner_optimizer", "loss_scale"):
            broken = damage.changed(config, ("config", key), damage.put(foreign))
            model = attempt(lambda c=broken: load_with(c, load), (key, label))
            assert model is None or label == "no config", (key, label)


@pytest.mark.parametrize("load", [keras.saving.load_model, keras_lso.load_model])
def test_lambda_in_config_loads_only_without_safe_mode(load, load_with, sentinel):
    """Inside of our optimizers as anywhere: it is the caller's word that counts."""
    config = good_config("bounds")
    rate = {"class_name": "__lambda__", "config": {"value": damage.lambda_("0.125")}}
    config["config"]["inner_optimizer"]["config"]["learning_rate"] = rate
    with pytest.raises(ValueError, match="Python lambda"):
        load_with(config, load)
    with quietly():
        model = load_with(config, load, safe_mode=False)
    assert model.optimizer.learning_rate == 0.125


# --- Nested configs -----------------------------------------------------------


def cyclic():
    config = good_config("bounds")
    config["config"]["inner_optimizer"] = config
    return config


def larcs(depth):
    config = good_config("LogMax")["config"]["inner_optimizer"]
    for _ in range(depth):
        config = {**config, "config": {**config["config"], "inner_optimizer": config}}
    return config


def twice():
    config = good_config("bounds")
    inner = copy.deepcopy(config)
    config["config"]["inner_optimizer"] = inner
    return config


NESTED = {
    "a wrapper in a wrapper": (twice, "must not be a LossScaleOptimizer"),
    "a config in itself": (cyclic, "contains itself"),
    "a thousand LARCs": (lambda: larcs(1000), "nested too deeply"),
    "a deep config": (lambda: damage.nested(10**5), "nested too deeply"),
}


@pytest.mark.parametrize("kind", NESTED)
def test_recursive_or_too_deeply_nested_config_is_rejected(kind):
    make, words = NESTED[kind]
    for read in (
        keras_lso.deserialize,
        lambda config: LossScaleOptimizer.from_config({"inner_optimizer": config}),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            read(make())


# --- Other versions -----------------------------------------------------------


def test_error_names_config_key_of_another_version():
    for kind in OPTIMIZERS:
        config = good_config(kind)
        policies = [v for k, v in config["config"].items() if k == "loss_scale"]
        for arguments in (config["config"], *(p["config"] for p in policies)):
            arguments["shrink_factor"] = 3
            with pytest.raises((ValueError, TypeError), match="shrink_factor"):
                keras_lso.deserialize(config)
            del arguments["shrink_factor"]


def test_error_names_loss_scale_policy_of_another_version(load_with):
    config = good_config("bounds")
    config["config"]["loss_scale"] = {
        "module": "keras_lso.loss_scales.adaptive",
        "class_name": "AdaptiveLossScale",
        "registered_name": "keras_lso>AdaptiveLossScale",
        "config": {},
    }
    for load in (keras.saving.load_model, keras_lso.load_model):
        with pytest.raises(TypeError, match="AdaptiveLossScale"):
            load_with(config, load)


# --- What has a `from_config` -------------------------------------------------

CLASSES = [
    LossScaleOptimizer,
    LARC,
    loss_scales.DynamicLossScale,
    loss_scales.FixedLossScale,
    loss_scales.LogMaxLossScale,
    loss_scales.SearchingLossScale,
    schedules.JoinedSchedules,
    schedules.LinearWarmup,
    schedules.PolynomialWarmup,
    LAMB,
    LARS,
    NovoGrad,
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_from_config_rejects_malformed_config(cls):
    for config in (None, 3, "adam", [1], {1: 2}, {"learning_rates": 0.5}, {"x": {}}):
        with pytest.raises((TypeError, ValueError)) as error:
            cls.from_config(config)
        assert_clear(error.value, repr(config))
