"""`LAMB` does what the Model Garden's does, and optax's, and trains in float16.

Each reference runs in its own framework, on the same gradients: see
`layer_references.py`. TensorFlow Addons has no release beside this TensorFlow. Its
class is the Model Garden's, which was copied from there, but for the name of one
argument.
"""

import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.layer_references import (
    RECORDED,
    assert_same,
    make_gradients,
    make_start,
    model_gardens_steps,
    stacked,
    trajectory,
    unstacked,
)
from keras_lso import LAMB


@pytest.fixture
def start():
    return make_start()


@pytest.fixture
def gradients():
    return make_gradients()


@pytest.fixture
def model_gardens(original, model_garden, start, gradients):
    """`model_gardens(settings, rates=None)`: the recorded steps of the Model Garden's.

    For `rates` see `model_gardens_steps`.
    """

    def get(settings, rates=None):
        return unstacked(
            original(
                lambda: model_gardens_steps(
                    model_garden("lamb").LAMB, settings, rates, start, gradients
                )
            )
        )

    return get


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
    settings, start, gradients, model_gardens, assert_close
):
    settings = {"learning_rate": 0.05, **settings}
    ours = trajectory(LAMB(**settings), start, gradients)
    assert_same(ours[RECORDED], model_gardens(settings), assert_close)


def test_lamb_with_schedule_matches_model_garden(
    start, gradients, model_gardens, assert_close
):
    rates = dict(
        initial_learning_rate=0.1, decay_steps=40, end_learning_rate=0.01, power=2.0
    )
    settings = dict(weight_decay_rate=0.01)
    schedule = keras.optimizers.schedules.PolynomialDecay(**rates)
    ours = trajectory(LAMB(schedule, **settings), start, gradients)
    assert_same(ours[RECORDED], model_gardens(settings, rates), assert_close)


def test_lamb_matches_optax(start, gradients, original, assert_close):
    # 1 - beta has no rounding error in float32, which optax does not share.
    betas = 1 - 2**-3, 1 - 2**-7
    ours = LAMB(0.05, *betas, weight_decay_rate=0.02)

    def run():
        import jax
        import optax

        optimizer = optax.lamb(0.05, *betas, eps=1e-6, weight_decay=0.02)
        weights = jax.tree.map(jax.numpy.asarray, start)
        state = optimizer.init(weights)
        steps = []
        for grads in gradients:
            grads = jax.tree.map(jax.numpy.asarray, grads)
            updates, state = optimizer.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            steps.append([np.asarray(weights[path]) for path in start])
        return stacked(steps)

    ours = trajectory(ours, start, gradients)
    assert_same(ours[RECORDED], unstacked(original(run)), assert_close)


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
def test_config_of_model_garden_lamb_loads(settings, original, model_garden):
    def run():
        import tf_keras

        cls = model_garden("lamb").LAMB
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


def test_lamb_config_with_tf_keras_schedule_loads(original, model_garden):
    def run():
        import tf_keras

        theirs = tf_keras.optimizers.schedules.PolynomialDecay(0.5, 8, 0.1, power=2.0)
        config = model_garden("lamb").LAMB(learning_rate=theirs).get_config()
        return config, [float(theirs(step)) for step in range(6)]

    config, expected = original(run)
    ours = LAMB.from_config(json.loads(json.dumps(config)))
    rates = []
    w = keras.Variable([3.0, 4.0], name="w")
    for _ in range(6):
        rates.append(float(ours.learning_rate))
        ours.apply([ops.zeros(2)], [w])
    # The same formula in another order.
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
