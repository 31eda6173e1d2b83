"""Configs in the forms of tf.keras 2.

`integration_tests/test_tf_keras_configs.py` reads those that tf.keras wrote.
"""

import copy

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso.mixed_precision import experimental

NUMBERS = {"learning_rate": 0.5, "decay": 0.0, "momentum": 0.75, "nesterov": True}
SGD = {"class_name": "SGD", "config": {"name": "SGD", **NUMBERS}}
DYNAMIC = {
    "class_name": "DynamicLossScale",
    "config": {"initial_loss_scale": 64.0, "increment_period": 7, "multiplier": 2.0},
}
FIXED = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 64.0}}
OF_2_4 = {"inner_optimizer": SGD, "initial_scale": 64.0}

# The arguments of `from_config`, and the scale that they describe: the initial one, and
# the number of steps until it grows.
LOSS_SCALE_OPTIMIZERS = {
    "2.0, dynamic": ({"optimizer": SGD, "loss_scale": DYNAMIC}, (64.0, 7)),
    "2.0, fixed": ({"optimizer": SGD, "loss_scale": FIXED}, (64.0, None)),
    "2.4, dynamic": ({**OF_2_4, "dynamic_growth_steps": 7}, (64.0, 7)),
    "2.4, fixed": (
        {**OF_2_4, "dynamic": False, "dynamic_growth_steps": None},
        (64.0, None),
    ),
}
# tf.keras compared names without regard to case.
ADDRESSES = [
    {"class_name": "lossscaleoptimizer"},
    {"class_name": "LossScaleOptimizer", "module": "keras.mixed_precision"},
    {"class_name": "LossScaleOptimizer", "module": "keras.src.mixed_precision"},
]


def read(config, read=keras_lso.deserialize):
    """Reads a config, which stays as it is."""
    before = copy.deepcopy(config)
    optimizer = read(config)
    assert config == before
    return optimizer


def rates(optimizer, steps=(0, 1, 2, 10, 1000)):
    """Returns the learning rates at some steps."""
    found = []
    for step in steps:
        optimizer.iterations.assign(step)
        found.append(float(optimizer.learning_rate))
    return found


@pytest.mark.parametrize("kind", LOSS_SCALE_OPTIMIZERS)
def test_every_form_of_wrapper_config_is_read(kind):
    config, (scale, growth_steps) = LOSS_SCALE_OPTIMIZERS[kind]
    old = experimental.LossScaleOptimizer
    addressed = [read({**address, "config": config}) for address in ADDRESSES]
    modern = [*addressed, read(config, LossScaleOptimizer.from_config)]
    assert {type(optimizer) for optimizer in modern} == {LossScaleOptimizer}
    for optimizer in (*modern, read(config, old.from_config)):
        assert isinstance(optimizer, LossScaleOptimizer)
        assert float(optimizer.loss_scale) == scale
        assert optimizer.dynamic is (growth_steps is not None)
        assert optimizer.dynamic_growth_steps == growth_steps
        inner = optimizer.inner_optimizer
        assert (inner.momentum, inner.nesterov) == (0.75, True)
        assert float(inner.learning_rate) == 0.5
    assert type(optimizer) is old


MALFORMED = {
    "no scale": ({"optimizer": SGD}, "must hold a 'loss_scale'"),
    "no inner config": ({"optimizer": "sgd", "loss_scale": FIXED}, "config dict"),
    "another optimizer": (
        {"inner_optimizer": SGD, "optimizer": SGD, "loss_scale": FIXED},
        "`optimizer`",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_configs_are_rejected(kind):
    config, words = MALFORMED[kind]
    with pytest.raises((TypeError, ValueError), match=words):
        read({"class_name": "LossScaleOptimizer", "config": config})
    with pytest.raises((TypeError, ValueError), match=words):
        LossScaleOptimizer.from_config(config)


@pytest.mark.parametrize("class_name", ["SGD", "adam"])
@pytest.mark.parametrize("rate", [1, np.float32(0.5)])
@pytest.mark.parametrize("key", ["lr", "learning_rate"])
def test_learning_rate_is_read_under_both_names(class_name, rate, key):
    optimizer = read({"class_name": class_name, "config": {key: rate, "decay": 0.0}})
    assert type(optimizer).__name__.lower() == class_name.lower()
    assert float(optimizer.learning_rate) == rate


DECAY = {"initial_learning_rate": 0.5, "decay_steps": 10, "decay_rate": 0.25}


def test_schedule_without_name_is_read_for_lars():
    schedule = {"class_name": "ExponentialDecay", "config": {**DECAY, "name": None}}
    expected = keras.optimizers.schedules.ExponentialDecay(**DECAY)
    optimizer = read({"class_name": "LARS", "config": {"learning_rate": schedule}})
    assert rates(optimizer) == rates(keras.optimizers.SGD(expected))


def test_schedule_together_with_decay_is_rejected():
    schedule = {"class_name": "ExponentialDecay", "config": DECAY}
    config = {"learning_rate": schedule, "decay": 0.5}
    with pytest.raises(ValueError, match="both a schedule and a `decay`.*Write the"):
        read({"class_name": "SGD", "config": config})


@pytest.mark.parametrize(
    "module, arguments",
    [
        ("tf_keras.src.optimizers.adam", {}),
        ("keras.src.optimizers.adam", {"jit_compile": False}),
    ],
)
def test_optimizer_in_module_of_tf_keras_is_read(module, arguments):
    address = {"class_name": "Adam", "module": module, "registered_name": "Custom>Adam"}
    optimizer = read({**address, "config": {"beta_1": 0.5, **arguments}})
    assert isinstance(optimizer, keras.optimizers.Adam) and optimizer.beta_1 == 0.5


def test_error_names_unknown_optimizer():
    with pytest.raises((TypeError, ValueError), match="(?i)(unknown|locate).*Novograd"):
        read({"class_name": "Novograd", "config": {}})


@keras.saving.register_keras_serializable("my_optimizers")
class Adam(keras.optimizers.Adam):
    """A user's class with an argument `decay`."""

    def __init__(self, learning_rate=0.5, decay=0.0, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.decay = decay

    def get_config(self):
        return {**super().get_config(), "decay": self.decay}


def test_registered_optimizer_of_same_name_is_kept(monkeypatch):
    monkeypatch.setattr(Adam, "__module__", "my_project.optimizers")
    optimizer = LossScaleOptimizer(Adam(0.5, decay=0.25))
    for again in (
        read(keras.optimizers.serialize(optimizer)),
        LossScaleOptimizer.from_config(optimizer.get_config()),
    ):
        assert type(again.inner_optimizer) is Adam
        assert again.inner_optimizer.decay == 0.25


@pytest.mark.parametrize("how", ["argument", "scope"])
def test_custom_object_of_same_name_is_kept(how):
    config = {
        "module": "my_project.optimizers",
        "class_name": "Adam",
        "config": {"learning_rate": 0.5, "decay": 0.25},
        "registered_name": "Adam",
    }
    wrapped = {
        "class_name": "LossScaleOptimizer",
        "config": {"inner_optimizer": config, "dynamic": True},
    }
    mine = {"Adam": Adam}
    if how == "argument":
        found = keras_lso.deserialize(config, custom_objects=mine)
        wrapper = keras_lso.deserialize(wrapped, custom_objects=mine)
    else:
        with keras.saving.custom_object_scope(mine):
            found, wrapper = read(config), read(wrapped)
    assert type(found) is Adam and found.decay == 0.25
    assert type(wrapper.inner_optimizer) is Adam
