"""Gradients that overwrite their variables, such as float8's scales, are no gradients.

Keras's optimizers assign them. They are neither scaled nor added up, and no norm, no
largest magnitude and no outlier is of them.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso

K = keras.optimizers
RANDOM = np.random.default_rng(0)
# Each is far larger than the gradients, and would hide them in a norm.
SCALES = 1e6
with_and_without_scale = pytest.mark.parametrize("scale", [1.0, 2.0**10])
of_each_window = pytest.mark.parametrize("window", [None, 2])


def make(scale=1.0, window=None, **options):
    """An optimizer, a weight that it trains, and one that is overwritten."""
    weight, own = (keras.Variable(np.ones(8, "float32")) for _ in "ab")
    own.overwrite_with_gradient = True
    inner = K.SGD(1e-3, gradient_accumulation_steps=window)
    optimizer = keras_lso.LossScaleOptimizer(inner, initial_scale=scale, **options)
    optimizer.build([weight, own])
    return optimizer, [weight, own]


def apply(optimizer, variables, gradient, value):
    scale = float(optimizer.loss_scale)
    grads = [ops.full((8,), gradient * scale), ops.full((8,), value)]
    optimizer.apply(grads, variables, scaled=True)


@with_and_without_scale
@of_each_window
def test_recorded_norm_is_of_gradients_of_loss_alone(scale, window):
    optimizer, variables = make(scale, window)
    optimizer.record_steps(8)
    for gradient in (1.0, 2.0, 3.0, 4.0):
        apply(optimizer, variables, gradient, SCALES)
    norms = optimizer.read_record()["gradient_norm"]
    np.testing.assert_allclose(norms, np.sqrt(8) * np.arange(1, 5), rtol=1e-6)


@with_and_without_scale
@of_each_window
def test_guard_judges_gradients_of_loss_alone(scale, window):
    guard = keras_lso.SpikeGuard(window=8, warmup=4)
    optimizer, variables = make(scale, window, spike_guard=guard)
    calm = RANDOM.uniform(0.9, 1.1, 12)
    # The first value is an outlier among values, the last gradient one among gradients.
    values = [SCALES] * 12
    values[-2:] = 1e12, 1e12
    for gradient, value in zip(calm, values, strict=True):
        apply(optimizer, variables, gradient, value)
    assert int(optimizer.skipped_spikes) == 0
    for _ in range(window or 1):
        apply(optimizer, variables, 100.0, SCALES)
    assert int(optimizer.skipped_spikes) == 1


def test_values_need_no_headroom_for_windows():
    """They are not added up: Keras keeps the largest of a window."""
    optimizer, variables = make(window=2)
    for _ in range(2):
        apply(optimizer, variables, 1.0, 3e38)
    assert int(optimizer.skipped_steps) == 0
    np.testing.assert_array_equal(ops.convert_to_numpy(variables[1]), np.float32(3e38))


@with_and_without_scale
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_value_that_is_not_finite_skips_step_and_is_recorded(bad, scale):
    optimizer, variables = make(scale)
    optimizer.record_overflows()
    apply(optimizer, variables, 1.0, bad)
    assert int(optimizer.skipped_steps) == 1
    assert optimizer.overflowed_variables() == variables[1:]
    for variable in variables:
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), 1.0)


def test_large_value_is_no_overflow_at_small_loss_scale():
    """Unscaled it would be one."""
    optimizer, variables = make(2.0**-10)
    optimizer.record_overflows()
    apply(optimizer, variables, 1.0, 3e38)
    assert int(optimizer.skipped_steps) == 0
    assert optimizer.overflowed_variables() == []


def test_step_with_values_alone_assigns_them():
    optimizer, variables = make()
    optimizer.record_steps(4)
    optimizer.apply([None, ops.full((8,), 5.0)], variables, scaled=True)
    np.testing.assert_array_equal(ops.convert_to_numpy(variables[1]), 5.0)
    assert optimizer.read_record()["gradient_norm"] == [0.0]


def test_averages_are_swapped_beside_overwritten_variables():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.layers[-1].quantize("float8")
    inner = K.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model.compile(keras_lso.GuardedOptimizer(inner), loss="mse")
    x, y = RANDOM.normal(size=(16, 4)), RANDOM.normal(size=(16, 3))
    swap = keras_lso.callbacks.SwapEMAWeights()
    history = model.fit(
        x, y, verbose=0, callbacks=[swap], validation_data=(x, y), epochs=2
    )
    assert np.isfinite(history.history["val_loss"]).all()
    model.optimizer.finalize_variable_values(model.trainable_variables)


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="Keras's float8 has no gradient in eager TensorFlow",
)
def test_underflow_report_counts_no_values():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.layers[-1].quantize("float8")
    model.compile(keras_lso.GuardedOptimizer(K.SGD()), loss="mse")
    report = keras_lso.underflow_report(
        model, RANDOM.normal(size=(16, 4)), RANDOM.normal(size=(16, 3))
    )
    [layer] = report.layers.values()
    # Of a kernel and a bias, and of no scale and no history of 1024 values.
    assert layer.values == 4 * 3 + 3
