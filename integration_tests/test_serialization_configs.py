"""Configs: what is written comes back, or is refused whole.

Configs go through every function that Keras has for them, and through JSON, as in
a file.
"""

import inspect

import keras
import pytest
from keras import ops

import keras_lso
from integration_tests.saved_models import (
    POLICIES,
    UNREGISTERED,
    UnregisteredLossScale,
    UnregisteredSGD,
    every_policy,
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
    """Its config, but for the number that Keras gives to each of a class (`sgd_1`)."""
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


def scales_after(optimizer, steps):
    """The scale after each step: "f" for a finite one, "o" for an overflow."""
    optimizer.build([keras.Variable([1.0])])
    scales = []
    for step in steps:
        # The largest gradient, for policies that ask for it.
        optimizer.loss_scale_policy.step(step == "f", ops.ones(()))
        scales.append(float(optimizer.loss_scale))
    return scales


@pytest.mark.exhaustive
@every_route
@every_policy
def test_optimizer_from_config_behaves_like_original(policy, route, no_warnings):
    optimizer = LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]())
    loaded = route(optimizer)

    assert type(loaded) is LossScaleOptimizer
    assert loaded.get_config() == optimizer.get_config()
    assert repr(loaded.loss_scale_policy) == repr(optimizer.loss_scale_policy)
    assert arguments_of(loaded.inner_optimizer) == arguments_of(
        optimizer.inner_optimizer
    )
    steps = "fffoofooofffffff"
    assert scales_after(loaded, steps) == scales_after(optimizer, steps)


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
