"""The configs of LARS, LAMB, NovoGrad and LARC, and models that are saved with them."""

import json

import keras
import pytest
from keras import ops

import keras_lso
from keras_lso import LAMB, LARC, LARS, LossScaleOptimizer, NovoGrad
from keras_lso._backend import backend
from testing.refusals import sgd
from testing.schedules import Half


def larc(**settings):
    return LARC(sgd(), **settings)


NUMBERS = dict(learning_rate=0.5, weight_decay_rate=0.125, epsilon=0.25, name="mine")
BETAS = dict(beta_1=0.75, beta_2=0.25)
EXCLUDED = dict(exclude_from_weight_decay=["bn", r"bias$"])
ADAPTED = dict(exclude_from_layer_adaptation=[])
# In all cases of a class together, every argument has another value than by default.
CONFIGURED = {
    "LARS": (LARS, {}),
    "LARS, numbers": (LARS, dict(**NUMBERS, momentum=0.75, eeta=0.25, decay=2.0)),
    "LARS, paper": (
        LARS,
        dict(nesterov=True, trust_ratio="paper", trust_clip=True, exclude_1d=True),
    ),
    "LARS, lists": (LARS, dict(**EXCLUDED, **ADAPTED, classic_momentum=False)),
    "LARS, Keras's": (
        LARS,
        dict(
            clipnorm=1.0, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2
        ),
    ),
    "LAMB, numbers": (LAMB, dict(**NUMBERS, **BETAS, decay=0.25, clipvalue=2.0)),
    "LAMB, lists": (LAMB, dict(**EXCLUDED, **ADAPTED, bias_correction=False)),
    "LAMB, bounds": (
        LAMB,
        dict(min_trust_ratio=0.5, max_trust_ratio=2.0, exclude_1d=True),
    ),
    "NovoGrad, numbers": (NovoGrad, dict(**NUMBERS, **BETAS, global_clipnorm=1.0)),
    "NovoGrad, lists": (NovoGrad, dict(**EXCLUDED, grad_averaging=True)),
    "LARC": (larc, dict(eta=0.1, mode="scale", min_update=1e-3, exclude=["bias"])),
    "LARC, named": (larc, dict(epsilon=1e-4, name="mine")),
}


def round_trips(optimizer):
    """Yields the optimizer after each way to save and load its config."""
    yield type(optimizer).from_config(optimizer.get_config())
    serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    yield keras_lso.deserialize(serialized)
    yield keras.saving.deserialize_keras_object(serialized)
    yield keras.saving.deserialize_keras_object(
        json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    )


@pytest.mark.parametrize("make, settings", CONFIGURED.values(), ids=CONFIGURED)
def test_config_contains_all_arguments_and_round_trips(make, settings):
    optimizer = make(**settings)
    config = optimizer.get_config()
    before = json.dumps(config)
    assert {key: config[key] for key in settings} == settings
    for twin in round_trips(optimizer):
        assert type(twin) is type(optimizer)
        assert twin.get_config() == config
    scaled = LossScaleOptimizer(optimizer)
    for twin in round_trips(scaled):
        assert type(twin.inner_optimizer) is type(optimizer)
        assert twin.get_config() == scaled.get_config()
    # Changes to a config do not change the optimizer, nor the reverse.
    type(optimizer).from_config(config)
    assert json.dumps(config) == before
    for value in config.values():
        if isinstance(value, list):
            value.append("more")
    assert json.dumps(optimizer.get_config()) == before


def test_from_config_accepts_weight_decay_none():
    config = keras.optimizers.Lamb(0.5).get_config()
    assert config["weight_decay"] is None
    read = LAMB.from_config(config)
    assert (read.weight_decay, read.weight_decay_rate) == (None, 0.0)
    assert float(read.learning_rate) == 0.5


@keras.saving.register_keras_serializable("test_lars")
class MySchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * ops.cast(step + 1, "float32")

    def get_config(self):
        return {"rate": self.rate}


@pytest.mark.parametrize("cls", [LARS, LAMB, NovoGrad])
def test_keras_and_custom_schedules_round_trip_in_config(cls):
    keras_own = keras.optimizers.schedules.CosineDecay(0.25, 10, alpha=0.5, name="mine")
    for schedule in (keras_own, MySchedule(0.25)):
        for twin in round_trips(cls(schedule)):
            restored = twin.get_config()["learning_rate"]
            assert restored["class_name"] == type(schedule).__name__
            assert restored["config"] == schedule.get_config()
            assert float(twin.learning_rate) == 0.25


def test_from_config_finds_schedule_in_custom_objects():
    config = LARS(Half()).get_config()
    twin = LARS.from_config(config, custom_objects={"Half": Half})
    assert float(twin.learning_rate) == 0.5


class HalfSteps(LARS):
    pass


def test_subclass_round_trips_as_its_own_class():
    config = keras.saving.serialize_keras_object(HalfSteps(0.5, eeta=0.25))
    twin = keras.saving.deserialize_keras_object(
        config, custom_objects={"HalfSteps": HalfSteps}
    )
    assert type(twin) is HalfSteps
    assert twin.eeta == 0.25


def test_deserialize_restores_other_class_named_lars():
    @keras.saving.register_keras_serializable("elsewhere", name="LARS")
    class Other(keras.optimizers.SGD):
        pass

    read = keras_lso.deserialize(keras.optimizers.serialize(Other(0.5)))
    assert isinstance(read, Other)
    config = {"class_name": "LARS", "config": {"learning_rate": 0.5}}
    assert type(keras_lso.deserialize(config)) is LARS
    assert type(keras_lso.deserialize(config, {"LARS": HalfSteps})) is HalfSteps


@pytest.mark.each_backend
def test_repr_names_class_and_rate(monkeypatch):
    schedule = keras_lso.schedules.LinearWarmup(0.5, 4)
    for cls in (LAMB, LARS, NovoGrad):
        assert repr(cls(0.1)) == f"{cls.__name__}(learning_rate=0.1)"
        assert repr(cls(schedule)) == f"{cls.__name__}(learning_rate={schedule!r})"
    # It reads nothing from an accelerator.
    monkeypatch.setattr(type(backend), "value_if_on_host", lambda *_: None)
    assert repr(LARS(0.1)) == "LARS()"
