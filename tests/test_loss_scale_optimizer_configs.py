"""The config of a `LossScaleOptimizer` makes an equal one."""

import keras
import pytest

from keras_lso import LossScaleOptimizer, SpikeGuard


def test_loss_scale_factor_is_cleared_with_warning_naming_initial_scale():
    inner = keras.optimizers.SGD(0.1, loss_scale_factor=512.0)
    with pytest.warns(UserWarning, match="initial_scale=512.0") as record:
        optimizer = LossScaleOptimizer(inner)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert inner.loss_scale_factor is None
    assert optimizer.loss_scale_factor is None


def test_default_config_has_same_keys_as_keras_class():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    ours = optimizer.get_config()
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    assert list(ours) == list(theirs.get_config())
    assert ours["name"] == "loss_scale_optimizer"
    assert ours["initial_scale"] == 2.0**15
    assert ours["dynamic_growth_steps"] == 2000
    assert ours["inner_optimizer"]["module"] == "keras.optimizers"
    assert ours["inner_optimizer"]["class_name"] == "SGD"


GUARD = SpikeGuard(5.0, 32, 16, 100.0)
ARGUMENTS = {
    "default": ({}, {}),
    "dynamic": ({"initial_scale": 64.0, "dynamic_growth_steps": 5, "name": "mine"}, {}),
    "lowest scale": ({"min_scale": 1.0}, {"min_scale": 1.0}),
    "highest scale": ({"max_scale": 2.0**16}, {"max_scale": 2.0**16}),
    "fixed": ({"dynamic": False, "initial_scale": 64}, {"dynamic": False}),
    "number": ({"loss_scale": 64}, {"dynamic": False}),
    "no masters": ({"master_weights": False}, {"master_weights": False}),
    "masters": ({"master_weights": "stochastic"}, {"master_weights": "stochastic"}),
    "slots": ({"slot_dtype": "bfloat16"}, {"slot_dtype": "bfloat16"}),
    "slots in 8 bits": ({"slot_dtype": "int8"}, {"slot_dtype": "int8"}),
    "spike guard": (
        {"spike_guard": GUARD},
        {"spike_guard": keras.saving.serialize_keras_object(GUARD)},
    ),
}


@pytest.mark.parametrize("arguments, extra", ARGUMENTS.values(), ids=ARGUMENTS)
def test_config_round_trips_arguments_and_inner_optimizer(arguments, extra):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.9), **arguments)
    config = optimizer.get_config()
    others = {"name", "inner_optimizer", "initial_scale", "dynamic_growth_steps"}
    assert {k: v for k, v in config.items() if k not in others} == extra

    before = repr(config)
    twin = LossScaleOptimizer.from_config(config)
    assert repr(config) == before, "from_config changed its argument"
    assert twin.get_config() == config
    assert repr(twin.loss_scale_policy) == repr(optimizer.loss_scale_policy)
    assert twin.spike_guard == optimizer.spike_guard
    assert twin.name == optimizer.name
    assert type(twin.inner_optimizer) is type(optimizer.inner_optimizer)
    assert twin.inner_optimizer.momentum == 0.9


def test_from_config_accepts_config_of_keras_class():
    theirs = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, name="sgd"), initial_scale=64.0
    )
    ours = LossScaleOptimizer.from_config(theirs.get_config())
    assert float(ours.loss_scale) == 64.0
    # Older versions of Keras wrote these, at their defaults.
    older = {"weight_decay": None, "use_ema": False, "ema_momentum": 0.99}
    ours = LossScaleOptimizer.from_config({**theirs.get_config(), **older})
    assert ours.inner_optimizer.get_config()["learning_rate"] == 0.5
    with pytest.raises(ValueError, match="does not support `use_ema`"):
        LossScaleOptimizer.from_config({**theirs.get_config(), "use_ema": True})
