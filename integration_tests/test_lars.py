"""`LARS` does what the originals do: the Model Garden's and optax's.

Each reference runs in its own framework, on the same gradients: see
`layer_references.py`.
"""

import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.layer_references import (
    SHAPES,
    assert_as_recorded,
    by_model_garden,
    by_optax,
    trajectory,
)
from keras_lso import LARS


@pytest.fixture
def cls_of_model_garden(model_garden):
    return lambda: model_garden("lars").LARS


@pytest.mark.exhaustive
@pytest.mark.parametrize("excluded", [None, ["bn", "bias"]], ids=["all", "some"])
@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("classic", [True, False], ids=["classic", "popular"])
def test_lars_matches_model_garden(
    classic, nesterov, decay, excluded, cls_of_model_garden, original, assert_close
):
    settings = dict(
        learning_rate=0.5,
        momentum=0.9,
        weight_decay_rate=decay,
        eeta=0.01,
        nesterov=nesterov,
        classic_momentum=classic,
        exclude_from_weight_decay=excluded,
    )
    theirs = original(by_model_garden(cls_of_model_garden, settings))
    assert_as_recorded(trajectory(LARS(**settings)), theirs, assert_close)


@pytest.mark.parametrize("classic", [True, False], ids=["classic", "popular"])
def test_lars_with_schedule_matches_model_garden(
    classic, cls_of_model_garden, original, assert_close
):
    rates = dict(
        initial_learning_rate=0.8, decay_steps=40, end_learning_rate=0.01, power=2.0
    )
    settings = dict(eeta=0.01, classic_momentum=classic, weight_decay_rate=0.01)
    theirs = original(by_model_garden(cls_of_model_garden, settings, rates))
    schedule = keras.optimizers.schedules.PolynomialDecay(**rates)
    assert_as_recorded(trajectory(LARS(schedule, **settings)), theirs, assert_close)


def test_lars_with_decay_argument_matches_model_garden(
    cls_of_model_garden, original, assert_close
):
    settings = dict(learning_rate=0.5, eeta=0.01, decay=0.1)
    theirs = original(by_model_garden(cls_of_model_garden, settings))
    assert_as_recorded(trajectory(LARS(**settings)), theirs, assert_close)


@pytest.mark.exhaustive
@pytest.mark.parametrize("excluded", [None, ["bn", "bias"]], ids=["all", "some"])
@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_matches_optax(nesterov, decay, excluded, original, assert_close):
    ours = LARS(
        learning_rate=0.5,
        momentum=0.9,
        weight_decay_rate=decay,
        eeta=0.01,
        nesterov=nesterov,
        exclude_from_weight_decay=excluded,
    )
    mask = {
        path: not any(pattern in path for pattern in excluded or []) for path in SHAPES
    }
    theirs = by_optax(
        "lars",
        0.5,
        weight_decay=decay,
        weight_decay_mask=mask,
        trust_coefficient=0.01,
        trust_ratio_mask=mask,
        momentum=0.9,
        nesterov=nesterov,
    )
    assert_as_recorded(trajectory(ours), original(theirs), assert_close)


MODEL_GARDEN = {
    "by default": {},
    "all numbers": dict(
        learning_rate=0.5,
        momentum=0.75,
        weight_decay_rate=0.125,
        eeta=0.25,
        nesterov=True,
        classic_momentum=False,
        name="mine",
        decay=2.0,
    ),
    "clipnorm": dict(clipnorm=2.0),
    "clipvalue": dict(clipvalue=2.0),
    "global_clipnorm": dict(global_clipnorm=2.0),
}


@pytest.mark.parametrize("settings", MODEL_GARDEN.values(), ids=MODEL_GARDEN)
def test_config_of_model_garden_lars_loads(settings, original, cls_of_model_garden):
    config = original(lambda: cls_of_model_garden()(**settings).get_config())
    ours = LARS.from_config(config)
    expected = LARS(**settings).get_config()
    assert ours.get_config() == expected
    for address in (
        {"class_name": "LARS"},
        {"class_name": "LARS", "module": None},
        {
            "class_name": "LARS",
            "module": "official.modeling.optimization.lars",
            "registered_name": "LARS",
        },
        {"class_name": "LARS", "module": None, "registered_name": "LARS"},
    ):
        read = keras_lso.deserialize({**address, "config": config})
        assert type(read) is LARS
        assert read.get_config() == expected


SCHEDULES = {
    "ExponentialDecay": dict(
        initial_learning_rate=0.5, decay_steps=4, decay_rate=0.25, staircase=True
    ),
    "PiecewiseConstantDecay": dict(boundaries=[2, 4], values=[0.5, 0.25, 0.125]),
    "PolynomialDecay": dict(
        initial_learning_rate=0.5, decay_steps=8, end_learning_rate=0.1, power=2.0
    ),
    "InverseTimeDecay": dict(initial_learning_rate=0.5, decay_steps=2, decay_rate=3.0),
    "CosineDecay": dict(initial_learning_rate=0.5, decay_steps=8, alpha=0.25),
    "CosineDecayRestarts": dict(initial_learning_rate=0.5, first_decay_steps=3),
}


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("schedule, settings", SCHEDULES.items(), ids=SCHEDULES)
def test_lars_config_with_tf_keras_schedule_loads(
    schedule, settings, name, original, cls_of_model_garden
):
    def run():
        import tf_keras

        cls = getattr(tf_keras.optimizers.schedules, schedule)
        theirs = cls(**settings, name=name)
        config = cls_of_model_garden()(learning_rate=theirs).get_config()
        return config, [float(theirs(step)) for step in range(6)]

    config, expected = original(run)
    assert isinstance(config["learning_rate"], dict)
    wrapped = {"class_name": "LARS", "config": config}
    for ours in (
        LARS.from_config(json.loads(json.dumps(config))),
        keras_lso.deserialize(json.loads(json.dumps(wrapped))),
    ):
        rates = []
        w = keras.Variable([3.0, 4.0], name="w")
        for _ in range(6):
            rates.append(float(ours.learning_rate))
            ours.apply([ops.zeros(2)], [w])
        # The same formula in another order.
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
