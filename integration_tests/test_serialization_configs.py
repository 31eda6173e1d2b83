"""Configs of every inner optimizer and of a user's classes, through JSON as in a file.

`tests/_core/test_loss_scale_optimizer_configs.py` has the arguments of the wrapper, and
`tests/test_loss_scales.py` the policies.
"""

import inspect

import keras
import pytest

import keras_lso
from integration_tests.saved_models import (
    UNREGISTERED,
    UnregisteredLossScale,
    UnregisteredSGD,
    momentum_sgd,
    through_json,
)
from keras_lso import LossScaleOptimizer

INNER_CLASSES = sorted(
    name
    for name, cls in vars(keras.optimizers).items()
    if inspect.isclass(cls)
    and issubclass(cls, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)


def arguments_of(inner_optimizer):
    """Returns a config without the number in the name, as in `sgd_1`."""
    config = inner_optimizer.get_config()
    return {**config, "name": config["name"].rstrip("_0123456789")}


ROUTES = {
    "from_config": lambda o, **custom: LossScaleOptimizer.from_config(
        through_json(o.get_config()), **custom
    ),
    "keras.saving": lambda o, **custom: keras.saving.deserialize_keras_object(
        through_json(keras.saving.serialize_keras_object(o)), **custom
    ),
    "keras_lso.deserialize": lambda o, **custom: keras_lso.deserialize(
        through_json(keras.optimizers.serialize(o)), **custom
    ),
}
every_route = pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)


@pytest.mark.parametrize("name", INNER_CLASSES)
def test_inner_config_names_public_class(name):
    inner = getattr(keras.optimizers, name)(0.01)
    optimizer = LossScaleOptimizer(inner)
    config = through_json(optimizer.get_config())

    named = config["inner_optimizer"]
    assert named["module"] == "keras.optimizers"
    assert named["class_name"] == name
    assert named["registered_name"] is None
    loaded = LossScaleOptimizer.from_config(config).inner_optimizer
    assert type(loaded) is type(inner)
    assert arguments_of(loaded) == arguments_of(inner)


@every_route
def test_unregistered_classes_load_only_with_custom_objects(route):
    optimizer = LossScaleOptimizer(
        UnregisteredSGD(0.05, stride=3), loss_scale=UnregisteredLossScale(64.0)
    )
    loaded = route(optimizer, custom_objects=UNREGISTERED)
    assert type(loaded.inner_optimizer) is UnregisteredSGD
    assert loaded.inner_optimizer.stride == 3
    assert type(loaded.loss_scale_policy) is UnregisteredLossScale
    assert loaded.initial_scale == 64.0

    with keras.saving.custom_object_scope(UNREGISTERED):
        loaded = route(optimizer)
    assert type(loaded.inner_optimizer) is UnregisteredSGD

    with pytest.raises(TypeError, match="Could not locate class 'UnregisteredSGD'"):
        route(optimizer)


def test_registered_subclass_round_trips_as_itself():
    @keras.saving.register_keras_serializable("integration_tests")
    class Subclass(LossScaleOptimizer):
        pass

    optimizer = Subclass(momentum_sgd(), initial_scale=64.0)
    for restore in (keras.saving.deserialize_keras_object, keras_lso.deserialize):
        loaded = restore(through_json(keras.saving.serialize_keras_object(optimizer)))
        assert type(loaded) is Subclass
        assert loaded.initial_scale == 64.0
