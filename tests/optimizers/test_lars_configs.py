"""The configs of `LARS`: round trips, schedules in them, and whole models."""

import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LARS, LossScaleOptimizer
from testing.lars import (
    MODEL_GARDEN_ARGUMENTS,
    OWN_ARGUMENTS,
    PATHS,
    values_of,
    variable,
)
from testing.optimizer_steps import apply

# --- Configs ------------------------------------------------------------------

CONFIGURED = {
    "by default": {},
    "all numbers": dict(
        learning_rate=0.5,
        momentum=0.75,
        weight_decay_rate=0.125,
        eeta=0.25,
        nesterov=True,
        name="mine",
        epsilon=0.5,
        decay=2.0,
    ),
    "popular": dict(classic_momentum=False),
    "paper": dict(trust_ratio="paper", trust_clip=True, exclude_1d=True),
    "lists": dict(
        exclude_from_weight_decay=["bn", r"bias$"],
        exclude_from_layer_adaptation=["gamma"],
    ),
    "empty lists": dict(exclude_from_weight_decay=[], exclude_from_layer_adaptation=[]),
    "one list": dict(exclude_from_weight_decay=["bn"]),
    "Keras's keywords": dict(
        clipnorm=1.0, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2
    ),
    "global_clipnorm": dict(global_clipnorm=2.0),
    "clipvalue": dict(clipvalue=2.0),
    "decoupled": dict(weight_decay=0.125),
    "lr": dict(lr=0.5),
}
KERAS_KEYS = set(keras.optimizers.Optimizer(0.5).get_config())


def round_trips(optimizer):
    """The optimizer, come back on each way that there is."""
    yield type(optimizer).from_config(optimizer.get_config())
    serialized = keras.optimizers.serialize(optimizer)
    serialized = json.loads(json.dumps(serialized))
    yield keras_lso.deserialize(serialized)
    yield keras.saving.deserialize_keras_object(serialized)
    yield keras.saving.deserialize_keras_object(
        json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    )


@pytest.mark.parametrize("settings", CONFIGURED.values(), ids=CONFIGURED)
def test_config_contains_all_arguments_and_round_trips(settings):
    optimizer = LARS(**settings)
    config = optimizer.get_config()
    own = set(MODEL_GARDEN_ARGUMENTS) | set(OWN_ARGUMENTS) | {"decay"}
    assert set(config) == own | KERAS_KEYS
    for key, value in settings.items():
        assert config["learning_rate" if key == "lr" else key] == value
    for twin in round_trips(optimizer):
        assert type(twin) is LARS
        assert twin.get_config() == config


@pytest.mark.parametrize("settings", CONFIGURED.values(), ids=CONFIGURED)
def test_changing_config_does_not_change_optimizer(settings):
    optimizer = LARS(**settings)
    config = optimizer.get_config()
    for key in ("exclude_from_weight_decay", "exclude_from_layer_adaptation"):
        if config[key] is not None:
            assert type(config[key]) is list
            config[key].append("more")
    before = dict(config)
    LARS.from_config(config)
    assert config == before
    assert "more" not in json.dumps(optimizer.get_config())


def test_deserialized_optimizer_steps_bitwise_like_original(start, gradients):
    optimizer = LARS(
        keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.25),
        weight_decay_rate=0.1,
        eeta=0.1,
        classic_momentum=False,
        exclude_from_weight_decay=["bn"],
        exclude_from_layer_adaptation=["bias"],
        decay=0.5,
    )
    results = []
    for twin in [optimizer, *round_trips(optimizer)]:
        variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
        for grads in gradients:
            apply(twin, grads, variables)
        results.append([w.tobytes() for w in values_of(variables)])
    assert len(results) == 5
    assert results[1:] == results[:1] * 4


def test_keras_schedule_round_trips_in_config():
    schedule = keras.optimizers.schedules.CosineDecay(0.25, 10, alpha=0.5, name="mine")
    for twin in round_trips(LARS(schedule)):
        restored = twin.get_config()["learning_rate"]
        assert restored["class_name"] == "CosineDecay"
        assert restored["config"] == schedule.get_config()
        assert float(twin.learning_rate) == 0.25


def test_from_config_does_not_change_config():
    schedule = keras.optimizers.schedules.CosineDecay(0.25, 10)
    config = LARS(schedule, exclude_from_weight_decay=["bn"]).get_config()
    before = json.dumps(config)
    LARS.from_config(config)
    assert json.dumps(config) == before


@keras.saving.register_keras_serializable("test_lars")
class MySchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * ops.cast(step + 1, "float32")

    def get_config(self):
        return {"rate": self.rate}


def test_registered_custom_schedule_round_trips_in_config():
    for twin in round_trips(LARS(MySchedule(0.25))):
        assert twin.get_config()["learning_rate"]["config"] == {"rate": 0.25}
        assert float(twin.learning_rate) == 0.25


class Unregistered(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.75

    def get_config(self):
        return {}


def test_from_config_finds_schedule_in_custom_objects():
    config = LARS(Unregistered()).get_config()
    twin = LARS.from_config(config, custom_objects={"Unregistered": Unregistered})
    assert float(twin.learning_rate) == 0.75


def test_lars_in_loss_scale_optimizer_round_trips_through_config():
    optimizer = LossScaleOptimizer(
        LARS(0.5, exclude_from_weight_decay=["bn"], exclude_from_layer_adaptation=[])
    )
    serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    twin = keras_lso.deserialize(serialized)
    assert type(twin.inner_optimizer) is LARS
    assert twin.get_config() == optimizer.get_config()


def test_deserialize_restores_other_registered_class_named_lars():
    @keras.saving.register_keras_serializable("elsewhere", name="LARS")
    class Other(keras.optimizers.SGD):
        pass

    read = keras_lso.deserialize(keras.optimizers.serialize(Other(0.5)))
    assert isinstance(read, Other)


def test_deserialize_prefers_custom_object_named_lars():
    class Mine(keras.optimizers.SGD):
        pass

    config = {"class_name": "LARS", "config": {"learning_rate": 0.5}}
    assert type(keras_lso.deserialize(config)) is LARS
    mine = keras_lso.deserialize(config, custom_objects={"LARS": Mine})
    assert isinstance(mine, Mine)


# --- Models -------------------------------------------------------------------


# `torch.compile` takes a minute, and leaves the optimizer outside.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "jit_compile", [False] if keras.backend.backend() == "torch" else [False, True]
)
def test_saved_model_restores_optimizer_and_continues_training_identically(
    wrap, tmp_path, snapshot, jit_compile
):
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 3)).astype("float32")
    y = random.normal(size=(8, 1)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
    optimizer = wrap(
        LARS(
            keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.25),
            weight_decay_rate=0.1,
            exclude_from_weight_decay=["bias"],
        )
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert int(optimizer.iterations) == 4
    path = tmp_path / "model.keras"
    model.save(path)
    twin = keras.saving.load_model(path)
    assert type(twin.optimizer) is type(optimizer)
    assert twin.optimizer.get_config() == optimizer.get_config()
    assert snapshot(twin.optimizer.variables) == snapshot(optimizer.variables)
    for m in (model, twin):
        m.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert snapshot(twin.variables) == snapshot(model.variables)
