"""Configs that tf.keras writes, as trees to record.

Three writers: the new and the legacy optimizers of the installed tf_keras, and "2.5",
the copy of TensorFlow 2.5 in TensorFlow, `tensorflow.python.keras`.
Tests import this module where they run the originals.
"""

import tensorflow as tf
import tf_keras
from tensorflow.python.keras import optimizers as keras_2_5
from tensorflow.python.keras.mixed_precision import loss_scale_optimizer as mixed_2_5
from tensorflow.python.keras.optimizer_v2 import (
    adadelta,
    adagrad,
    adam,
    adamax,
    ftrl,
    gradient_descent,
    learning_rate_schedule,
    nadam,
    rmsprop,
)

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
# Further arguments of the new classes of tf_keras, which Keras 3 has as well.
COMMON = {"clipnorm": 2.0, "use_ema": True, "ema_momentum": 0.5, "weight_decay": 0.125}


def classes(module):
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and name in ARGUMENTS
        and issubclass(cls, (tf_keras.optimizers.Optimizer, module.Optimizer))
    }


MODULES = {
    "new": classes(tf_keras.optimizers),
    "legacy": classes(tf_keras.optimizers.legacy),
    "2.5": {
        "SGD": gradient_descent.SGD,
        "Adam": adam.Adam,
        "RMSprop": rmsprop.RMSprop,
        "Adagrad": adagrad.Adagrad,
        "Adadelta": adadelta.Adadelta,
        "Adamax": adamax.Adamax,
        "Nadam": nadam.Nadam,
        "Ftrl": ftrl.Ftrl,
    },
}


def names():
    """Returns the names of the classes of each writer."""
    return {writer: sorted(module) for writer, module in MODULES.items()}


def make(writer, name, rate=0.5, **more):
    arguments = {**ARGUMENTS[name], **more}
    if writer == "new":
        arguments = {**COMMON, **arguments}
    return MODULES[writer][name](rate, **arguments)


def described(optimizer):
    """Returns the name of the class, the config, and the configs in each format."""
    serialize = tf_keras.optimizers.serialize
    if "tensorflow.python" in type(optimizer).__module__:
        written = [keras_2_5.serialize(optimizer)]
    else:
        written = [serialize(optimizer), serialize(optimizer, use_legacy_format=True)]
    return {
        "class": type(optimizer).__name__,
        "config": optimizer.get_config(),
        "written": written,
    }


def optimizer(writer, name, trained, **more):
    theirs = make(writer, name, **more)
    if trained:
        w = tf.Variable([1.0, 2.0])
        for _ in range(2):
            theirs.apply_gradients([(tf.constant([0.5, -0.5]), w)])
    return described(theirs)


def rates_of_a_decay(writer, name, decay):
    theirs = make(writer, name, decay=decay)
    rates = []
    for step in STEPS:
        theirs.iterations.assign(step)
        rates.append(float(theirs._decayed_lr(tf.float32)))
    return rates


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


def schedule(writer, kind):
    """Returns its rates, and optimizers that have it."""
    if writer == "2.5":
        module = learning_rate_schedule
    else:
        module = tf_keras.optimizers.schedules
    rate = schedules(module)[kind]
    return {
        "rates": [float(rate(tf.constant(step))) for step in STEPS],
        "optimizers": [described(make(writer, n, rate=rate)) for n in ("SGD", "Adam")],
    }


def wrapper(writer, **scale):
    """Returns an Adam, and its wrapper."""
    if writer == "2.5":
        cls = mixed_2_5.LossScaleOptimizer
    else:
        cls = tf_keras.mixed_precision.LossScaleOptimizer
    inner = make(writer, "Adam")
    return described(inner), described(cls(inner, **scale))


def scale_of(kind):
    """Returns what the experimental class takes."""
    policies = tf.compat.v1.mixed_precision
    return {
        "dynamic": lambda: "dynamic",
        "fixed": lambda: 64,
        "an object": lambda: policies.DynamicLossScale(64, 7),
        "a fixed object": lambda: policies.FixedLossScale(64),
    }[kind]()


def experimental(kind):
    inner = make("2.5", "SGD", decay=0.25)
    theirs = mixed_2_5.LossScaleOptimizerV1(inner, scale_of(kind))
    return described(inner), described(theirs)


def of_2_0(kind):
    """Returns a config of TensorFlow 2.0 to 2.3, and the scale that it describes."""
    policy = scale_of(kind)
    loss_scale = {"class_name": type(policy).__name__, "config": policy.get_config()}
    inner = keras_2_5.serialize(make("2.5", "SGD"))
    config = {"optimizer": inner, "loss_scale": loss_scale}
    theirs = mixed_2_5.LossScaleOptimizer.from_config(config)
    return config, float(theirs.loss_scale)
