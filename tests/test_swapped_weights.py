"""Callbacks that swap a model's weights, and evaluations that an error interrupts."""

import warnings

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso.callbacks import SwapEMAWeights, SwapScheduleFreeWeights
from testing.trained_optimizers import bits_of

HAS_SCHEDULE_FREE = hasattr(keras.optimizers, "ScheduleFreeAdamW")
X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(-1, keepdims=True)


def averaging():
    return keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.75)


def schedule_free():
    return keras.optimizers.ScheduleFreeAdamW(0.125)


KINDS = [
    pytest.param(SwapEMAWeights, averaging, id="averages"),
    pytest.param(
        SwapScheduleFreeWeights,
        schedule_free,
        marks=pytest.mark.skipif(not HAS_SCHEDULE_FREE, reason="Keras has none"),
        id="schedule-free",
    ),
]
each_kind = pytest.mark.parametrize("swap, inner", KINDS)


def make_model(inner, dtype="float32"):
    start = keras.initializers.Constant(0.5)
    dense = keras.layers.Dense(1, kernel_initializer=start, dtype=dtype)
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(keras_lso.GuardedOptimizer(inner()), loss="mse")
    return model


def trained(inner, dtype="float32"):
    model = make_model(inner, dtype)
    for _ in range(3):
        model.train_on_batch(X, Y)
    return model


def of_model(model, swap, **arguments):
    callback = swap(**arguments)
    callback.set_model(model)
    return callback


@each_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_evaluation_is_undone_by_next_evaluation_or_run(swap, inner, dtype):
    model = trained(inner, dtype)
    before, callback = bits_of(model), of_model(model, swap)
    callback.on_predict_begin()
    averaged = bits_of(model)
    assert averaged != before
    callback.set_model(model)
    callback.on_test_begin()
    assert bits_of(model) == averaged
    callback.on_test_end()
    assert bits_of(model) == before
    callback.on_test_begin()
    of_model(model, swap).on_train_begin()
    assert bits_of(model) == before


class Interruption(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


@each_kind
def test_interrupted_fit_goes_on_from_trained_weights(swap, inner):
    model, seen, callback = make_model(inner), [], swap()
    # The first callback in the list sees the model before it is swapped.
    probe = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append(bits_of(model))
    )
    probe.on_test_begin = lambda logs: seen.append(bits_of(model))
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            X,
            Y,
            batch_size=4,
            validation_data=(X, Y),
            callbacks=[probe, callback, Interruption()],
            verbose=0,
        )
    model.fit(X, Y, callbacks=[callback, probe], verbose=0)
    _, at_validation, restored = seen
    assert restored == at_validation


@each_kind
def test_weights_loaded_after_interrupted_evaluation_are_kept(swap, inner):
    model = trained(inner)
    callback = of_model(model, swap)
    callback.on_test_begin()
    model.set_weights([np.full((3, 1), 0.25), np.zeros(1)])
    loaded = bits_of(model)
    callback.on_train_begin()
    assert bits_of(model) == loaded


@each_kind
def test_run_interrupted_at_end_of_epoch_is_restored_by_next_run(swap, inner):
    model = trained(inner)
    before, callback = bits_of(model), of_model(model, swap, swap_on_epoch=True)
    callback.on_epoch_end(0)
    assert bits_of(model) != before
    # An evaluation leaves the average in the model.
    averaged = bits_of(model)
    callback.on_test_begin()
    callback.on_test_end()
    assert bits_of(model) == averaged
    of_model(model, swap).on_train_begin()
    assert bits_of(model) == before


@pytest.mark.each_backend
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize(
    "callback, dtype, warns",
    [
        (keras.callbacks.SwapEMAWeights, "bfloat16", True),
        (keras.callbacks.SwapEMAWeights, "float32", False),
        (SwapEMAWeights, "bfloat16", False),
        (keras.callbacks.History, "bfloat16", False),
    ],
    ids=["Keras's", "without masters", "ours", "none"],
)
def test_callback_that_swaps_masters_alone_warns(callback, dtype, warns, is_built):
    model = (trained if is_built else make_model)(averaging, dtype)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(X, Y, validation_data=(X, Y), callbacks=[callback()], verbose=0)
        model.fit(X, Y, callbacks=callback(), verbose=0)
    texts = [str(w.message) for w in seen]
    words = "Write `keras_lso.callbacks.SwapEMAWeights()`"
    assert sum(words in text for text in texts) == warns
