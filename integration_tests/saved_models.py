"""Optimizers and models to write and to read: of every policy, trained or built."""

import functools
import json

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale, LogMaxLossScale, LossScale
from testing.keras_versions import multi_optimizer


@keras.saving.register_keras_serializable("integration_tests")
class CountingLossScale(LossScale):
    """Halves at every overflow, never grows, and counts what it has seen."""

    def build(self, add_variable=None):
        if self.built:
            return
        super().build(add_variable)
        self.overflows = self.add_variable("overflows", 0, dtype="int")

    def step(self, finite, amax=None):
        finite = ops.convert_to_tensor(finite, dtype="bool")
        overflows = ops.convert_to_tensor(self.overflows)
        self.assign_scale(ops.where(finite, self.value, self.value / 2))
        self.overflows.assign(ops.where(finite, overflows, overflows + 1))


class UnregisteredLossScale(CountingLossScale):
    """Found by `custom_objects` only."""


class UnregisteredSGD(keras.optimizers.SGD):
    """Found by `custom_objects` only, and needs a key of its own."""

    def __init__(self, *args, stride=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.stride = stride

    def get_config(self):
        return {**super().get_config(), "stride": self.stride}


# Each makes new arguments: a policy belongs to one optimizer.
POLICIES = {
    "default": dict,
    "scale": lambda: {"initial_scale": 2.0**10, "dynamic_growth_steps": 3},
    "bounds": lambda: {
        "initial_scale": 8.0,
        "dynamic_growth_steps": 2,
        "min_scale": 2.0,
        "max_scale": 16.0,
    },
    "fixed": lambda: {"dynamic": False, "initial_scale": 128.0},
    "fixed policy": lambda: {"loss_scale": 128},
    "multiplier": lambda: {"loss_scale": DynamicLossScale(2.0**10, 3, 4.0)},
    "factors": lambda: {
        "loss_scale": DynamicLossScale(
            2.0**10, 3, growth_factor=1.5, backoff_factor=0.25
        )
    },
    "hysteresis": lambda: {"loss_scale": DynamicLossScale(2.0**10, 3, hysteresis=2)},
    "consecutive hysteresis": lambda: {
        "loss_scale": DynamicLossScale(
            2.0**10, 3, hysteresis=3, consecutive_hysteresis=True
        )
    },
    "auto": lambda: {"initial_scale": "auto"},
    "LogMax": lambda: {
        "loss_scale": LogMaxLossScale(0.5, 2.0**12, beta2=0.9, original_overflow=True)
    },
    "user's own": lambda: {"loss_scale": CountingLossScale(2.0**10, min_scale=16.0)},
}
every_policy = pytest.mark.parametrize("policy", POLICIES)


def through_json(config):
    return json.loads(json.dumps(config))


LOADERS = {"keras": keras.saving.load_model, "keras_lso": keras_lso.load_model}
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS.keys())


def momentum_sgd(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def decaying_adam():
    return keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=3, decay_rate=0.5)
    )


def small_model(optimizer=None, dtype="mixed_float16", extra_layers=()):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, activation="tanh", dtype=dtype),
            *extra_layers,
            layers.Dense(2, dtype=dtype),
        ]
    )
    if optimizer is not None:
        model.compile(optimizer, loss="mean_squared_error")
    return model


def train(model, overflows=True, epochs=2):
    """Three batches an epoch; the gradients of the second overflow."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(12, 4)).astype("float32")
    y = numbers.normal(size=(12, 2)).astype("float32")
    if overflows:
        x[4, 0] = np.inf
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


def take_steps(model):
    """What `train` does to the optimizer; a policy's step need not be compiled."""
    optimizer, variables = model.optimizer, model.trainable_variables
    numbers = np.random.default_rng(0)
    for step in range(6):
        grads = [numbers.normal(size=v.shape).astype("float32") for v in variables]
        if step in (1, 4):
            grads[0][0, 0] = np.inf
        scale = optimizer.scale_loss(1.0)
        optimizer.apply([ops.convert_to_tensor(g) * scale for g in grads], variables)
    return model


@functools.cache
def trained_model(policy="default"):
    """Shared by the tests, which only read it."""
    optimizer = LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]())
    model = small_model(optimizer)
    return train(model) if policy == "default" else take_steps(model)


def built_model(optimizer, **options):
    """A model whose optimizer has a state of its own, without the time to train."""
    model = small_model(optimizer, **options)
    optimizer.build(model.trainable_variables)
    for i, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, 20 - i))
    return model


def state(optimizer):
    """What a file brings back: all variables but the last, `consecutive_skips`."""
    return [v.numpy() for v in optimizer.variables[:-1]]


def assert_same(actual, expected):
    """Bit for bit: NaN equals NaN, and 0.0 does not equal -0.0."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def assert_same_model(actual, expected):
    assert_same(actual.get_weights(), expected.get_weights())
    assert_same(state(actual.optimizer), state(expected.optimizer))


def of_two():
    return multi_optimizer(momentum_sgd(), {".*bias": keras.optimizers.Adam(0.01)})


UNREGISTERED = {
    "UnregisteredSGD": UnregisteredSGD,
    "UnregisteredLossScale": UnregisteredLossScale,
}


class Interruption(keras.callbacks.Callback):
    """Ends the program, as far as `fit` can tell, in the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 2 and batch == 1:
            raise KeyboardInterrupt
