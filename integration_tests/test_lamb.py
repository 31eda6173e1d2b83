"""`LAMB` does what the Model Garden's does, and optax's, and trains in float16.

Each reference runs in its own framework, on the same gradients: see
`layer_references.py`. TensorFlow Addons has no release beside this TensorFlow. Its
class is the Model Garden's, which was copied from there, but for the name of one
argument.
"""

import json

import keras
import pytest

import keras_lso
from integration_tests.layer_references import (
    assert_as_recorded,
    by_model_garden,
    by_optax,
    trajectory,
)
from keras_lso import LAMB


@pytest.fixture
def cls_of_model_garden(model_garden):
    return lambda: model_garden("lamb").LAMB


EXCLUDED = dict(exclude_from_weight_decay=["bn", "bias"])
CONFIGURATIONS = {
    "by default": {},
    "decay": dict(weight_decay_rate=0.02),
    "a high rate": dict(learning_rate=0.3),
    "other betas": dict(beta_1=0.5, beta_2=0.75),
    "no first moment": dict(beta_1=0.0, weight_decay_rate=0.02),
    "no second moment": dict(beta_2=0.0, epsilon=0.5),
    "epsilon": dict(epsilon=0.125),
    "heavy decay": dict(weight_decay_rate=2.0),
    "excluded": EXCLUDED,
    "excluded, decay": dict(weight_decay_rate=0.02, **EXCLUDED),
    "excluded from decay alone": dict(
        weight_decay_rate=0.02, exclude_from_layer_adaptation=["nothing"], **EXCLUDED
    ),
    "excluded from adaptation alone": dict(
        weight_decay_rate=0.02, exclude_from_layer_adaptation=["kernel", "gamma"]
    ),
    "inverse time decay": dict(decay=0.1, weight_decay_rate=0.02),
}


# In the Model Garden an empty list is none: a pattern in vain excludes nothing there.
@pytest.mark.filterwarnings("ignore:A pattern matches no variable.*'nothing'")
@pytest.mark.parametrize("settings", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_lamb_matches_model_garden(
    settings, cls_of_model_garden, original, assert_close
):
    settings = {"learning_rate": 0.05, **settings}
    theirs = original(by_model_garden(cls_of_model_garden, settings))
    assert_as_recorded(trajectory(LAMB(**settings)), theirs, assert_close)


def test_lamb_with_schedule_matches_model_garden(
    cls_of_model_garden, original, assert_close
):
    rates = dict(
        initial_learning_rate=0.1, decay_steps=40, end_learning_rate=0.01, power=2.0
    )
    settings = dict(weight_decay_rate=0.01)
    theirs = original(by_model_garden(cls_of_model_garden, settings, rates))
    schedule = keras.optimizers.schedules.PolynomialDecay(**rates)
    assert_as_recorded(trajectory(LAMB(schedule, **settings)), theirs, assert_close)


def test_lamb_matches_optax(original, assert_close):
    # 1 - beta has no rounding error in float32, which optax does not share.
    betas = 1 - 2**-3, 1 - 2**-7
    theirs = by_optax(
        "lamb", 0.05, b1=betas[0], b2=betas[1], eps=1e-6, weight_decay=0.02
    )
    ours = trajectory(LAMB(0.05, *betas, weight_decay_rate=0.02))
    assert_as_recorded(ours, original(theirs), assert_close)


SETTINGS = {
    "by default": {},
    "all numbers": dict(
        learning_rate=0.5,
        beta_1=0.75,
        beta_2=0.5,
        epsilon=0.25,
        weight_decay_rate=0.125,
        name="mine",
        decay=2.0,
    ),
    "clipnorm": dict(clipnorm=2.0),
    "global_clipnorm": dict(global_clipnorm=2.0),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_config_of_model_garden_lamb_loads(settings, original, cls_of_model_garden):
    def run():
        import tf_keras

        cls = cls_of_model_garden()
        return cls(**settings).get_config(), tf_keras.utils.get_registered_name(cls)

    config, name = original(run)
    expected = LAMB(**settings).get_config()
    assert LAMB.from_config(config).get_config() == expected
    assert name == "Addons>LAMB"
    for address in (
        {"class_name": "LAMB"},
        {"class_name": name},
        {"class_name": "LAMB", "module": None, "registered_name": "Addons>LAMB"},
        {
            "class_name": "LAMB",
            "module": "official.modeling.optimization.lamb",
            "registered_name": "Addons>LAMB",
        },
        {
            "class_name": "LAMB",
            "module": "tensorflow_addons.optimizers.lamb",
            "registered_name": "Addons>LAMB",
        },
    ):
        read = keras_lso.deserialize({**address, "config": config})
        assert type(read) is LAMB
        assert read.get_config() == expected


def test_config_of_tensorflow_addons_lamb_loads():
    """Its later versions say `weight_decay` where the Model Garden's adds `_rate`.

    As `get_config` of version 0.23 has it.
    """
    config = {
        "name": "LAMB",
        "learning_rate": 0.5,
        "weight_decay": 0.125,
        "decay": 2.0,
        "beta_1": 0.75,
        "beta_2": 0.5,
        "epsilon": 0.25,
    }
    wrapped = {"class_name": "Addons>LAMB", "config": config}
    ours = keras_lso.deserialize(json.loads(json.dumps(wrapped)))
    assert ours.weight_decay_rate == 0.125
    assert ours.weight_decay is None
    assert config["weight_decay"] == 0.125
    expected = LAMB(0.5, 0.75, 0.5, 0.25, 0.125, decay=2.0).get_config()
    assert ours.get_config() == expected
