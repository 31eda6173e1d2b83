"""Schedules in configs, files, copies and docstrings."""

import ast
import copy
import inspect
import json
import pickle
import re

import keras
import numpy as np
import pytest

from keras_lso.compat.model_garden import PolynomialDecayWithOffset
from keras_lso.compat.open_seq2seq import CosineDecayPolicy, FixedLR
from keras_lso.schedules import JoinedSchedules, LinearWarmup, PolynomialWarmup
from testing.schedules import (
    ALL,
    Half,
    assert_rates,
    every_schedule,
    rates,
    through_json,
)


def nested_twice():
    inner = PolynomialDecayWithOffset(
        offset=6, initial_learning_rate=1.0, decay_steps=4, name="inner"
    )
    keras_own = keras.optimizers.schedules.InverseTimeDecay(0.5, 2, 0.5)
    return JoinedSchedules(
        [LinearWarmup(inner, 3, name="outer"), PolynomialWarmup(keras_own, 2), 0.25],
        [5, 9],
    )


ALL_AND_NESTED = {**ALL, "nested": nested_twice}
every_schedule_and_nested = pytest.mark.parametrize(
    "make", ALL_AND_NESTED.values(), ids=ALL_AND_NESTED.keys()
)


def through_from_config(schedule):
    return type(schedule).from_config(schedule.get_config())


def through_saving(schedule):
    return keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(schedule)
    )


def through_sgd(schedule):
    config = json.loads(json.dumps(keras.optimizers.SGD(schedule).get_config()))
    return keras.optimizers.SGD.from_config(config)._learning_rate


def through_pickle(schedule):
    return pickle.loads(pickle.dumps(schedule))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "through",
    [
        through_from_config,
        through_json,
        through_saving,
        through_sgd,
        through_pickle,
        copy.deepcopy,
    ],
)
@every_schedule_and_nested
def test_schedule_round_trips_through_config_pickle_and_deepcopy(make, through):
    schedule = make()
    before = json.dumps(schedule.get_config())
    restored = through(schedule)
    assert type(restored) is type(schedule)
    assert restored is not schedule
    assert json.dumps(restored.get_config()) == before
    assert json.dumps(schedule.get_config()) == before
    np.testing.assert_array_equal(rates(restored), rates(schedule))


def test_nested_user_schedule_is_found_in_custom_objects():
    config = keras.optimizers.schedules.serialize(LinearWarmup(Half(), 2))
    restored = keras.optimizers.schedules.deserialize(config, {"Half": Half})
    assert isinstance(restored.schedule_or_rate, Half)
    assert_rates(restored, {0: 0.0, 1: 0.25, 2: 0.5})


@every_schedule
def test_every_argument_is_attribute_and_config_entry(make):
    schedule = make()
    arguments = inspect.signature(type(schedule)).parameters
    config = schedule.get_config()
    assert set(config) == set(arguments)
    assert config["name"] == "mine"
    for name, argument in arguments.items():
        assert hasattr(schedule, name)
        # Otherwise a copy that loses an argument would go unnoticed. All in `ALL`
        # return float32: for a `dtype` see
        # `tests/compat/open_seq2seq/test_schedules.py`.
        assert getattr(schedule, name) != argument.default or name == "dtype"


@every_schedule
def test_name_of_none_in_config_restores_class_name(make):
    schedule = make()
    config = {**schedule.get_config(), "name": None}
    assert type(schedule).from_config(config).name == type(schedule).__name__


@pytest.mark.parametrize("name", ["CosineDecay", "Sequential"])
def test_class_that_keras_has_too_is_found_by_its_registered_name(name):
    schedule = {
        "CosineDecay": CosineDecayPolicy(0.5, 100, warmup_steps=10),
        "Sequential": JoinedSchedules([0.5, 0.25], [10]),
    }[name]
    config = keras.saving.serialize_keras_object(schedule)
    assert config["class_name"] == config["config"]["name"] == name
    assert config["registered_name"] == f"keras_lso>{name}"
    restored = keras.saving.deserialize_keras_object(json.loads(json.dumps(config)))
    assert type(restored) is type(schedule)
    assert repr(restored).startswith(f"{type(schedule).__qualname__}(")


def test_changes_to_returned_config_leave_schedule_unchanged():
    for make in ALL.values():
        schedule = make()
        before = json.dumps(schedule.get_config())
        for value in schedule.get_config().values():
            if isinstance(value, list):
                value.append(0.5)
        assert json.dumps(schedule.get_config()) == before


def test_user_subclass_round_trips_additional_argument():
    class Shifted(FixedLR):
        def __init__(self, learning_rate, shift=1.0, name=None):
            super().__init__(learning_rate, name)
            self.shift = shift

        def __call__(self, step):
            return super().__call__(step) + self.shift

        def get_config(self):
            return {**super().get_config(), "shift": self.shift}

    schedule = Shifted.from_config(Shifted(0.5, 2.0).get_config())
    assert schedule.get_config() == {
        "learning_rate": 0.5,
        "name": "Shifted",
        "shift": 2.0,
    }
    assert float(schedule(0)) == 2.5


DEFAULT = re.compile(r"Defaults to\s+`(.*?)`", re.DOTALL)


def entries(docstring):
    """Returns the text about each argument in the section `Args`."""
    [section] = re.findall(r"^Args:\n((?:    .*\n)+)", docstring, re.MULTILINE)
    return dict(re.findall(r"^    (\w+): (.*\n(?: {8}.*\n)*)", section, re.MULTILINE))


@every_schedule
def test_docstring_documents_every_argument_and_default(make):
    cls = type(make())
    docstring = inspect.getdoc(cls)
    parameters = inspect.signature(cls).parameters
    documented = entries(docstring)
    assert list(documented) == list(parameters)
    for name, text in documented.items():
        default = parameters[name].default
        found = DEFAULT.findall(text)
        if default is inspect.Parameter.empty:
            assert not found, name
        else:
            assert [ast.literal_eval(each) for each in found] == [default], name
    for section in ("Args:", "Example:"):
        assert f"\n{section}\n" in docstring
