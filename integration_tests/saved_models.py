"""Optimizers and models to write and to read, trained or only built."""

import json

import keras
import numpy as np
from keras import layers, ops

import keras_lso
from keras_lso.loss_scales import LossScale
from testing.keras_versions import multi_optimizer


@keras.saving.register_keras_serializable("integration_tests")
class CountingLossScale(LossScale):
    """Halves at every overflow, never grows, and counts the overflows."""

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


def through_json(config):
    return json.loads(json.dumps(config))


LOADERS = {"keras": keras.saving.load_model, "keras_lso": keras_lso.load_model}


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


def wide_layers(dtype="mixed_float16"):
    """Returns layers for `small_model`, of which the second has slots in 8 bits."""
    return [layers.Dense(64, activation="tanh", dtype=dtype) for _ in range(2)]


def train(model, epochs=2):
    """Three batches an epoch; the gradients of the second overflow."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(12, 4)).astype("float32")
    y = numbers.normal(size=(12, 2)).astype("float32")
    x[4, 0] = np.inf
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


def built_model(optimizer, **options):
    """Returns a model whose optimizer has a state that is not that of a new one."""
    model = small_model(optimizer, **options)
    optimizer.build(model.trainable_variables)
    for i, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, 20 - i))
    return model


def state(optimizer):
    """Returns the variables that a file restores: all but `consecutive_skips`."""
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
