"""The names that schedules had: the same classes, which warn and stay in configs."""

import importlib
import json
import pickle
import warnings

import keras
import pytest

from keras_lso import schedules

pytestmark = pytest.mark.one_backend

OLD_NAMES = {
    "keras_lso.schedules.CosineDecay": schedules.CosineDecayPolicy,
    "keras_lso.schedules.policies_decay.CosineDecay": schedules.CosineDecayPolicy,
    "keras_lso.schedules.Sequential": schedules.JoinedSchedules,
    "keras_lso.schedules.sequential.Sequential": schedules.JoinedSchedules,
}
MADE = {
    "CosineDecay": schedules.CosineDecayPolicy(0.5, 100, warmup_steps=10),
    "Sequential": schedules.JoinedSchedules([0.5, 0.25], [10]),
}


@pytest.mark.parametrize("path", OLD_NAMES)
def test_a_name_of_before_is_the_same_class_and_warns(path):
    module, _, name = path.rpartition(".")
    message = f"`{path}` is deprecated.*`keras_lso.schedules.{{}}`"
    expected = OLD_NAMES[path]
    with pytest.warns(
        DeprecationWarning, match=message.format(expected.__qualname__)
    ) as warned:
        assert getattr(importlib.import_module(module), name) is expected
    assert [w.filename for w in warned] == [__file__]
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        namespace = {}
        exec(f"from {module} import {name}", namespace)
    assert namespace[name] is expected


def test_other_names_are_missing_as_in_any_module():
    with pytest.raises(AttributeError, match="'keras_lso.schedules' has no .*'Cosine'"):
        schedules.Cosine  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Cosine'"):
        from keras_lso.schedules import Cosine  # noqa: F401


def test_the_names_of_before_are_not_handed_on():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        namespace = {}
        exec("from keras_lso.schedules import *", namespace)
    assert not {"CosineDecay", "Sequential"} & namespace.keys()
    assert {"CosineDecayPolicy", "JoinedSchedules"} <= namespace.keys()


@pytest.mark.parametrize("saved_as", MADE)
def test_a_config_holds_the_name_of_before_and_is_read_without_a_warning(saved_as):
    schedule = MADE[saved_as]
    config = keras.saving.serialize_keras_object(schedule)
    assert config["class_name"] == saved_as
    assert config["registered_name"] == f"keras_lso>{saved_as}"
    assert config["config"]["name"] == saved_as
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = keras.saving.deserialize_keras_object(json.loads(json.dumps(config)))
    assert type(restored) is type(schedule)
    assert repr(type(restored)).endswith(f".{type(restored).__qualname__}'>")


@pytest.mark.parametrize("path", OLD_NAMES)
def test_a_pickle_of_before_loads(path):
    module, _, name = path.rpartition(".")
    old = f"c{module}\n{name}\n.".encode()
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert pickle.loads(old) is OLD_NAMES[path]


def test_the_model_gardens_spelling_is_no_other_class():
    assert schedules.PolynomialWarmUp is schedules.PolynomialWarmup
    assert schedules.PolynomialWarmUp.__name__ == "PolynomialWarmup"
