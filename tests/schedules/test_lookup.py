"""`get`, `serialize` and `deserialize` of schedules, and their names."""

import json

import keras
import pytest

from keras_lso import loss_scales, schedules
from keras_lso.compat import open_seq2seq
from testing.schedules import Half

OURS = schedules.JoinedSchedules(
    [schedules.LinearWarmup(keras.optimizers.schedules.CosineDecay(0.5, 10), 4), 0.25],
    [8],
)
KERASS = keras.optimizers.schedules.CosineDecay(0.5, 10, name="mine")


@pytest.mark.parametrize("schedule", [OURS, KERASS], ids=["ours", "Keras's"])
def test_serialize_matches_keras_and_round_trips(schedule):
    config = schedules.serialize(schedule)
    assert config == keras.optimizers.schedules.serialize(schedule)
    for read in (schedules.deserialize, schedules.get):
        restored = read(json.loads(json.dumps(config)))
        assert type(restored) is type(schedule)
        assert restored.get_config() == schedule.get_config()


def test_deserialize_finds_keras_lso_class_by_bare_name():
    config = {
        "class_name": "PolynomialWarmup",
        "config": {
            "schedule_or_rate": {
                "class_name": "LinearWarmup",
                "config": {"schedule_or_rate": 0.5, "warmup_steps": 2},
            },
            "warmup_steps": 4,
        },
    }
    schedule = schedules.deserialize(config)
    assert type(schedule) is schedules.PolynomialWarmup
    assert type(schedule.schedule_or_rate) is schedules.LinearWarmup
    # As in Keras's own function, which reads the same dict.
    config = {"class_name": "CosineDecay", "config": KERASS.get_config()}
    assert type(schedules.deserialize(config)) is type(KERASS)


def test_get_returns_schedule_for_each_kind_of_identifier():
    assert schedules.get(OURS) is OURS
    assert schedules.get(0.25).get_config() == open_seq2seq.FixedLR(0.25).get_config()
    assert type(schedules.get(1)) is open_seq2seq.FixedLR
    config = schedules.serialize(OURS)
    assert schedules.get(config).get_config() == OURS.get_config()
    assert isinstance(schedules.get("Half", {"Half": Half}), Half)
    config = {"class_name": "Half", "config": {}}
    assert isinstance(schedules.deserialize(config, {"Half": Half}), Half)


@pytest.mark.parametrize(
    "identifier, error, message",
    [
        (None, TypeError, "must be a schedule, .*=None of type NoneType"),
        (True, TypeError, "must be a schedule"),
        (lambda step: 0.5, TypeError, "must be a schedule"),
        (-0.5, ValueError, "`learning_rate` must be 0 or more"),
        ("LinearWarmup", ValueError, "must name a .*='LinearWarmup'"),
        ("CosineDecay", ValueError, "must name a .*='CosineDecay'"),
        ("Nothing", ValueError, "must name a .*='Nothing'"),
        ("SGD", ValueError, "must name a .*='SGD'"),
        ({}, ValueError, "must have a 'class_name'"),
        (OURS.get_config(), ValueError, "`get_config` returns only the arguments"),
        ({"class_name": 3}, ValueError, "must hold the name of a class as its"),
        (
            loss_scales.serialize(loss_scales.FixedLossScale(2)),
            ValueError,
            "must describe a schedule, not a FixedLossScale",
        ),
    ],
)
def test_get_rejects_invalid_identifier(identifier, error, message):
    with pytest.raises(error, match=message):
        schedules.get(identifier)


def test_get_by_name_error_names_missing_argument_in_cause():
    with pytest.raises(ValueError, match="or be a config dict") as error:
        schedules.get("FixedLR")
    assert "'learning_rate'" in str(error.value.__cause__)


def test_serialize_and_deserialize_reject_wrong_types():
    with pytest.raises(TypeError, match=r"`schedule` must be.*schedule=0\.5 of type"):
        schedules.serialize(0.5)
    with pytest.raises(TypeError, match="`config` must be a dict.*of type str"):
        schedules.deserialize("FixedLR")
