"""Configs that tf.keras itself has written: the hyperparameters that we read.

Two writers: the installed tf_keras, and the copy of TensorFlow 2.5 that TensorFlow
still carries as `tensorflow.python.keras`.
"""

import json

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import LossScaleOptimizer

tf_keras = pytest.importorskip("tf_keras")
tf = pytest.importorskip("tensorflow")
from tensorflow.python.keras import optimizers as keras_2_5  # noqa: E402
from tensorflow.python.keras.mixed_precision import (  # noqa: E402
    loss_scale_optimizer as mixed_2_5,
)

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = (0, 1, 2, 7, 1000)
# Of each class some arguments that are not its defaults.
ARGUMENTS = {
    "SGD": {"momentum": 0.75, "nesterov": True},
    "Adam": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.25, "amsgrad": True},
    "AdamW": {"beta_1": 0.5, "weight_decay": 0.25, "epsilon": 0.5},
    "RMSprop": {"rho": 0.5, "momentum": 0.25, "epsilon": 0.125, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.5, "epsilon": 0.25},
    "Adadelta": {"rho": 0.5, "epsilon": 0.25},
    "Adafactor": {"beta_2_decay": -0.5, "clip_threshold": 2.0, "relative_step": False},
    "Adamax": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.25},
    "Nadam": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.25},
    "Ftrl": {"learning_rate_power": -0.25, "initial_accumulator_value": 0.5},
    "Lion": {"beta_1": 0.5, "beta_2": 0.75},
}
# What the new classes of tf_keras take besides, and Keras 3 too.
COMMON = {"clipnorm": 2.0, "use_ema": True, "ema_momentum": 0.5, "weight_decay": 0.125}
# How tf.keras computed a step, not what; and what the tests of rates look at.
NOT_OURS = {"jit_compile", "is_legacy_optimizer", "decay", "learning_rate", "name"}


def classes(module):
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and name in ARGUMENTS
        and issubclass(cls, (tf_keras.optimizers.Optimizer, module.Optimizer))
    }


NEW = classes(tf_keras.optimizers)
LEGACY = classes(tf_keras.optimizers.legacy)


def old_classes():
    from tensorflow.python.keras.optimizer_v2 import (
        adadelta,
        adagrad,
        adam,
        adamax,
        ftrl,
        gradient_descent,
        nadam,
        rmsprop,
    )

    return {
        "SGD": gradient_descent.SGD,
        "Adam": adam.Adam,
        "RMSprop": rmsprop.RMSprop,
        "Adagrad": adagrad.Adagrad,
        "Adadelta": adadelta.Adadelta,
        "Adamax": adamax.Adamax,
        "Nadam": nadam.Nadam,
        "Ftrl": ftrl.Ftrl,
    }


OLD = old_classes()


def written(optimizer):
    """The configs that the library has for it."""
    if "tensorflow.python" in type(optimizer).__module__:
        return [keras_2_5.serialize(optimizer)]
    serialize = tf_keras.optimizers.serialize
    return [
        serialize(optimizer),
        serialize(optimizer, use_legacy_format=True),
    ]


def through_json(config):
    """As tf.keras writes a config into a file: NumPy's numbers become Python's."""
    return json.loads(json.dumps(config, default=lambda value: value.item()))


def take_steps(optimizer):
    w = tf.Variable([1.0, 2.0])
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant([0.5, -0.5]), w)])


def rates(optimizer):
    """The learning rate of a Keras 3 optimizer at some steps."""
    found = []
    for step in STEPS:
        optimizer.iterations.assign(step)
        found.append(float(optimizer.learning_rate))
    return found


def assert_same_hyperparameters(ours, theirs):
    assert type(ours).__name__ == type(theirs).__name__
    found = ours.get_config()
    compared = 0
    for key, value in theirs.get_config().items():
        if key in NOT_OURS:
            continue
        assert key in found, key
        assert found[key] == pytest.approx(value), key
        compared += 1
    assert compared >= 1


WRITERS = [
    *(pytest.param("new", name, id=f"new {name}") for name in NEW),
    *(pytest.param("legacy", name, id=f"legacy {name}") for name in LEGACY),
    *(pytest.param("2.5", name, id=f"2.5 {name}") for name in OLD),
]
MODULES = {"new": NEW, "legacy": LEGACY, "2.5": OLD}


def make(writer, name, rate=0.5, **more):
    arguments = {**ARGUMENTS[name], **more}
    if writer == "new":
        arguments = {**COMMON, **arguments}
    return MODULES[writer][name](rate, **arguments)


def test_all_classes_are_here():
    assert len(NEW) == 11 and len(LEGACY) == 8


# --- Inner optimizers ---------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("writer, name", WRITERS)
def test_hyperparameters(writer, name, in_file, trained):
    theirs = make(writer, name)
    if trained:
        take_steps(theirs)
    for config in written(theirs):
        if in_file:
            config = through_json(config)
        ours = keras_lso.deserialize(config)
        assert_same_hyperparameters(ours, theirs)
        # Legacy Nadam has a `decay` of 0.004, but not of the rate.
        assert rates(ours) == [0.5] * len(STEPS)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "writer, name", [p for p in WRITERS if p.values[0] != "new" and "Nadam" not in p.id]
)
def test_decay(writer, name, trained):
    theirs = make(writer, name, decay=0.25)
    if trained:
        take_steps(theirs)
    expected = []
    for step in STEPS:
        theirs.iterations.assign(step)
        expected.append(float(theirs._decayed_lr(tf.float32)))
    for config in written(theirs):
        ours = keras_lso.deserialize(config)
        assert_same_hyperparameters(ours, theirs)
        # Both in float32, the divisions in another order.
        np.testing.assert_allclose(rates(ours), expected, rtol=1e-6)


def schedules(module):
    return {
        "ExponentialDecay": module.ExponentialDecay(0.5, 4, 0.25, staircase=True),
        "named": module.ExponentialDecay(0.5, 4, 0.25, name="mine"),
        "PiecewiseConstantDecay": module.PiecewiseConstantDecay(
            [1, 5], [0.5, 0.25, 0.125]
        ),
        "PolynomialDecay": module.PolynomialDecay(0.5, 4, 0.125, power=2.0),
        "cycle": module.PolynomialDecay(0.5, 4, 0.125, cycle=True),
        "InverseTimeDecay": module.InverseTimeDecay(0.5, 4, 0.25),
        "CosineDecay": module.CosineDecay(0.5, 10, 0.25),
        "CosineDecayRestarts": module.CosineDecayRestarts(0.5, 3, 1.5, 0.5),
    }


@pytest.mark.parametrize("writer", MODULES)
@pytest.mark.parametrize("kind", schedules(keras.optimizers.schedules))
def test_schedules(writer, kind):
    if writer == "2.5":
        from tensorflow.python.keras.optimizer_v2 import (
            learning_rate_schedule as module,
        )
    else:
        module = tf_keras.optimizers.schedules
    schedule = schedules(module)[kind]
    expected = [float(schedule(tf.constant(step))) for step in STEPS]
    for name in ("SGD", "Adam"):
        theirs = make(writer, name, rate=schedule)
        for config in written(theirs):
            ours = keras_lso.deserialize(through_json(config))
            assert_same_hyperparameters(ours, theirs)
            # Cosines and powers of two libraries, in float32.
            np.testing.assert_allclose(rates(ours), expected, rtol=1e-5, atol=1e-7)


# --- Loss-scale optimizers ----------------------------------------------------

SCALES = {
    "default": ({}, (2.0**15, 2000)),
    "dynamic": ({"initial_scale": 64, "dynamic_growth_steps": 7}, (64.0, 7)),
    "fixed": ({"dynamic": False, "initial_scale": 64}, (64.0, None)),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("writer", MODULES)
def test_loss_scale_optimizers(writer, kind):
    arguments, (scale, growth_steps) = SCALES[kind]
    cls = (
        mixed_2_5.LossScaleOptimizer
        if writer == "2.5"
        else tf_keras.mixed_precision.LossScaleOptimizer
    )
    inner = make(writer, "Adam")
    theirs = cls(inner, **arguments)
    for config in written(theirs):
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
    ours = LossScaleOptimizer.from_config(theirs.get_config())
    assert_same_hyperparameters(ours.inner_optimizer, inner)


OLD_SCALES = {
    "dynamic": (lambda: "dynamic", (2.0**15, 2000)),
    "fixed": (lambda: 64, (64.0, None)),
    "an object": (
        lambda: tf.compat.v1.mixed_precision.DynamicLossScale(64, 7),
        (64.0, 7),
    ),
    "a fixed object": (
        lambda: tf.compat.v1.mixed_precision.FixedLossScale(64),
        (64.0, None),
    ),
}


@pytest.mark.parametrize("kind", OLD_SCALES)
def test_the_experimental_class_of_tensorflow(kind):
    make_scale, (scale, growth_steps) = OLD_SCALES[kind]
    inner = make("2.5", "SGD", decay=0.25)
    theirs = mixed_2_5.LossScaleOptimizerV1(inner, make_scale())
    config = keras_2_5.serialize(theirs)
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


@pytest.mark.parametrize("kind", OLD_SCALES)
def test_the_policies_of_tf1_are_read_from_their_configs(kind):
    """The form of TensorFlow 2.0 to 2.3: the policy's own config inside."""
    make_scale, (scale, growth_steps) = OLD_SCALES[kind]
    policy = make_scale()
    if isinstance(policy, (str, int)):
        pytest.skip("No policy")
    config = {
        "optimizer": keras_2_5.serialize(make("2.5", "SGD")),
        "loss_scale": {
            "class_name": type(policy).__name__,
            "config": policy.get_config(),
        },
    }
    ours = keras_lso.deserialize({"class_name": "LossScaleOptimizer", "config": config})
    assert float(ours.loss_scale) == scale
    assert ours.dynamic_growth_steps == growth_steps
    theirs = mixed_2_5.LossScaleOptimizer.from_config(config)
    assert float(theirs.loss_scale) == scale
