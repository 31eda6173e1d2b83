"""Configs that tf.keras wrote give the same hyperparameters and rates here.

`tf_keras_configs.py` has the calls of tf.keras.
"""

import json

import numpy as np
import pytest

import keras_lso
from keras_lso import LossScaleOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = (0, 1, 2, 7, 1000)
OF_2_5 = "SGD Adam RMSprop Adagrad Adadelta Adamax Nadam Ftrl".split()  # noqa: SIM905
CLASSES = {
    "new": [*OF_2_5, "AdamW", "Adafactor", "Lion"],
    "legacy": OF_2_5,
    "2.5": OF_2_5,
}
# Arguments that do not change the results of a step in tf.keras, and those that the
# tests of rates compare.
NOT_OURS = {"jit_compile", "is_legacy_optimizer", "decay", "learning_rate", "name"}


@pytest.fixture
def theirs(original):
    """`theirs(name, ...)`: what a function of `tf_keras_configs.py` returns."""

    def get(what, *arguments, record=None, **options):
        def run():
            from integration_tests import tf_keras_configs

            return getattr(tf_keras_configs, what)(*arguments, **options)

        return original(run, record)

    return get


def through_json(config):
    """Returns a config as in a file: Python's numbers in place of NumPy's."""
    return json.loads(json.dumps(config, default=lambda value: value.item()))


def rates(optimizer):
    """Returns the learning rates of a Keras 3 optimizer at some steps."""
    rates = []
    for step in STEPS:
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    return rates


def assert_same_hyperparameters(ours, theirs):
    assert type(ours).__name__ == theirs["class"]
    found = ours.get_config()
    compared = 0
    for key, value in theirs["config"].items():
        if key in NOT_OURS:
            continue
        assert key in found, key
        assert found[key] == pytest.approx(value), key
        compared += 1
    assert compared >= 1


WRITERS = [
    pytest.param(writer, name, id=f"{writer} {name}")
    for writer, names in CLASSES.items()
    for name in names
]


def test_optimizer_classes_of_tf_keras_are_all_covered(theirs):
    assert theirs("names") == {w: sorted(names) for w, names in CLASSES.items()}


@pytest.mark.parametrize("writer, name", WRITERS)
def test_hyperparameters_match_tf_keras(writer, name, theirs):
    written = theirs("optimizer", writer, name, trained=True)
    for config in (*written["written"], *map(through_json, written["written"])):
        ours = keras_lso.deserialize(config)
        assert_same_hyperparameters(ours, written)
        # Legacy Nadam has a `decay` of 0.004, but not of the rate.
        assert rates(ours) == [0.5] * len(STEPS)


@pytest.mark.parametrize(
    "writer, name", [p for p in WRITERS if p.values[0] != "new" and "Nadam" not in p.id]
)
def test_decay_gives_rates_of_tf_keras(writer, name, theirs):
    written = theirs("optimizer", writer, name, trained=True, decay=0.25)
    expected = theirs("rates_of_a_decay", writer, name, 0.25)
    for config in written["written"]:
        ours = keras_lso.deserialize(config)
        assert_same_hyperparameters(ours, written)
        # Both in float32, the divisions in another order.
        np.testing.assert_allclose(rates(ours), expected, rtol=1e-6)


@pytest.mark.parametrize("writer", CLASSES)
@pytest.mark.parametrize(
    "kind",
    [
        "ExponentialDecay",
        "named",
        "PiecewiseConstantDecay",
        "PolynomialDecay",
        "cycle",
        "InverseTimeDecay",
        "CosineDecay",
        "CosineDecayRestarts",
    ],
)
def test_schedules_give_rates_of_tf_keras(writer, kind, theirs):
    schedule = theirs("schedule", writer, kind)
    for written in schedule["optimizers"]:
        for config in written["written"]:
            ours = keras_lso.deserialize(through_json(config))
            assert_same_hyperparameters(ours, written)
            # Cosines and powers of two libraries, in float32.
            np.testing.assert_allclose(
                rates(ours), schedule["rates"], rtol=1e-5, atol=1e-7
            )


SCALES = {
    "default": ({}, (2.0**15, 2000)),
    "dynamic": ({"initial_scale": 64, "dynamic_growth_steps": 7}, (64.0, 7)),
    "fixed": ({"dynamic": False, "initial_scale": 64}, (64.0, None)),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("writer", CLASSES)
def test_loss_scale_optimizer_config_of_tf_keras_loads(writer, kind, theirs):
    arguments, (scale, growth_steps) = SCALES[kind]
    inner, wrapper = theirs("wrapper", writer, **arguments)
    for config in wrapper["written"]:
        config = through_json(config)
        found = [
            keras_lso.deserialize(config),
            LossScaleOptimizer.from_config(config["config"]),
        ]
        for ours in found:
            assert type(ours) is LossScaleOptimizer
            assert float(ours.loss_scale) == scale
            assert ours.dynamic_growth_steps == growth_steps
            assert_same_hyperparameters(ours.inner_optimizer, inner)
    ours = LossScaleOptimizer.from_config(wrapper["config"])
    assert_same_hyperparameters(ours.inner_optimizer, inner)


POLICIES = {"an object": (64.0, 7), "a fixed object": (64.0, None)}
OLD_SCALES = {"dynamic": (2.0**15, 2000), "fixed": (64.0, None), **POLICIES}


@pytest.mark.parametrize("kind", OLD_SCALES)
def test_config_of_experimental_class_of_tensorflow_loads(kind, theirs):
    scale, growth_steps = OLD_SCALES[kind]
    inner, wrapper = theirs("experimental", kind)
    [config] = wrapper["written"]
    assert config["class_name"] == "LossScaleOptimizerV1"
    ours = keras_lso.deserialize(config)
    assert float(ours.loss_scale) == scale
    assert ours.dynamic_growth_steps == growth_steps
    assert_same_hyperparameters(ours.inner_optimizer, inner)
    np.testing.assert_allclose(
        rates(ours.inner_optimizer),
        [0.5 / (1 + 0.25 * step) for step in STEPS],
        rtol=1e-6,
    )


@pytest.mark.parametrize("kind", POLICIES)
def test_config_with_tf1_loss_scale_policy_loads(kind, theirs):
    """The form of TensorFlow 2.0 to 2.3: the policy's own config inside."""
    scale, growth_steps = POLICIES[kind]
    config, their_scale = theirs("of_2_0", kind)
    ours = keras_lso.deserialize({"class_name": "LossScaleOptimizer", "config": config})
    assert float(ours.loss_scale) == scale == their_scale
    assert ours.dynamic_growth_steps == growth_steps
