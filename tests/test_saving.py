"""`deserialize` and `adopt` make our optimizer from configs.

The integration tests read whole files.
"""

import copy

import keras
import pytest

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso.compat.saving import adopt
from testing.keras_versions import reads_lower_case


def theirs(**arguments):
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.75), **arguments
    )


def written_on_pytorch(config):
    """Returns the config that Keras writes on PyTorch."""
    config = copy.deepcopy(config)
    inner = config["config"]["inner_optimizer"]
    inner["module"] = "keras.src.backend.torch.optimizers.torch_sgd"
    inner["registered_name"] = "SGD"
    return config


@pytest.mark.parametrize("on_pytorch", [False, True])
def test_keras_class_deserializes_as_keras_lso_class(on_pytorch):
    config = keras.optimizers.serialize(
        theirs(initial_scale=64.0, dynamic_growth_steps=7, name="mine")
    )
    if on_pytorch:
        config = written_on_pytorch(config)
    ours = keras_lso.deserialize(config)
    assert type(ours) is LossScaleOptimizer
    assert float(ours.loss_scale) == 64.0
    assert ours.dynamic_growth_steps == 7
    assert ours.name == "mine"
    assert isinstance(ours.inner_optimizer, keras.optimizers.SGD)
    assert ours.momentum == 0.75
    assert float(ours.learning_rate) == 0.5


BARE = {
    "without a module": {"class_name": "LossScaleOptimizer"},
    "in lower case": {"class_name": "lossscaleoptimizer", "module": "keras.optimizers"},
    "from its source module": {
        "class_name": "LossScaleOptimizer",
        "module": "keras.src.optimizers.loss_scale_optimizer",
    },
}


@pytest.mark.parametrize("spelling", BARE.values(), ids=BARE)
def test_every_spelling_of_keras_class_deserializes_as_keras_lso_class(spelling):
    # `keras.optimizers.deserialize` takes all of these for its own class, or did.
    config = {**spelling, "config": theirs(initial_scale=64.0).get_config()}
    if reads_lower_case or spelling is not BARE["in lower case"]:
        read = keras.optimizers.deserialize(copy.deepcopy(config))
        assert isinstance(read, keras.optimizers.LossScaleOptimizer)
    ours = keras_lso.deserialize(config)
    assert type(ours) is LossScaleOptimizer
    assert float(ours.loss_scale) == 64.0


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.Adam(0.5), keras.optimizers.RMSprop(0.5)]
)
def test_other_optimizers_round_trip_through_config(optimizer):
    twin = keras_lso.deserialize(keras.optimizers.serialize(optimizer))
    assert type(twin) is type(optimizer)
    assert twin.get_config() == optimizer.get_config()


def test_deserialize_and_adopt_do_not_modify_config():
    config = written_on_pytorch(keras.optimizers.serialize(theirs()))
    before = copy.deepcopy(config)
    keras_lso.deserialize(config)
    adopt(config)
    assert config == before


def test_non_finite_rate_of_nested_schedule_is_rejected():
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    config = keras.optimizers.serialize(
        LossScaleOptimizer(keras.optimizers.SGD(schedule))
    )
    inner = config["config"]["inner_optimizer"]["config"]
    inner["learning_rate"]["config"]["initial_learning_rate"] = float("inf")
    with pytest.raises(ValueError, match="learning_rate of the.*finite in float32"):
        keras_lso.deserialize(config)


@pytest.mark.parametrize("config", [None, "adam", 3, [], {}, {"config": {}}])
def test_deserialize_rejects_values_that_are_not_configs(config):
    with pytest.raises(ValueError, match="`config` must be the dict") as error:
        keras_lso.deserialize(config)
    assert "keras.optimizers.serialize" in str(error.value)
    assert repr(config) in str(error.value)


def test_deserialize_rejects_config_of_other_object():
    config = keras.saving.serialize_keras_object(keras.layers.Dense(2))
    with pytest.raises(ValueError, match="must describe an optimizer.*Dense"):
        keras_lso.deserialize(config)


def test_adopt_leaves_same_named_class_of_other_package_unchanged():
    config = {
        "module": "somebody.optimizers",
        "class_name": "LossScaleOptimizer",
        "config": {"inner_optimizer": None},
        "registered_name": "somebody>LossScaleOptimizer",
    }
    assert adopt(config) == config
    # A layer of that name has no config of an optimizer.
    config = {"class_name": "LossScaleOptimizer", "config": "not a dict"}
    assert adopt(config) == config
