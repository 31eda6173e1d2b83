"""Gradients that overwrite their variables, such as float8's scales.

Keras's optimizers assign them. They are neither scaled nor accumulated, and no norm,
largest magnitude or outlier counts them.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import BACKEND, Harness

K = keras.optimizers
RANDOM = np.random.default_rng(0)
# Each is far larger than the gradients, and would hide them in a norm.
SCALES = 1e6
with_and_without_scale = pytest.mark.parametrize("scale", [1.0, 2.0**10])
with_and_without_accumulation = pytest.mark.parametrize("count", [None, 2])


class Overwriting(Harness):
    """A weight that is trained, and one that is overwritten."""

    def __init__(self, scale=1.0, count=None, **options):
        weight, overwritten = (keras.Variable(np.ones(8, "float32")) for _ in "ab")
        overwritten.overwrite_with_gradient = True
        inner = K.SGD(1e-3, gradient_accumulation_steps=count)
        optimizer = keras_lso.LossScaleOptimizer(inner, initial_scale=scale, **options)
        super().__init__(optimizer, [weight, overwritten])

    def step(self, gradient, value):
        self.apply([ops.full((8,), gradient * self.scale), ops.full((8,), value)])


@with_and_without_scale
@with_and_without_accumulation
def test_recorded_norm_is_of_gradients_of_loss_alone(scale, count):
    run = Overwriting(scale, count)
    run.optimizer.record_steps(8)
    for gradient in (1.0, 2.0, 3.0, 4.0):
        run.step(gradient, SCALES)
    norms = run.optimizer.read_record()["gradient_norm"]
    np.testing.assert_allclose(norms, np.sqrt(8) * np.arange(1, 5), rtol=1e-6)


@with_and_without_scale
@with_and_without_accumulation
def test_guard_judges_gradients_of_loss_alone(scale, count):
    guard = keras_lso.SpikeGuard(window=8, warmup=4)
    run = Overwriting(scale, count, spike_guard=guard)
    # The last two values are outliers among values, the last gradient one among
    # gradients.
    values = [SCALES] * 10 + [1e12] * 2
    for gradient, value in zip(RANDOM.uniform(0.9, 1.1, 12), values, strict=True):
        run.step(gradient, value)
    assert int(run.optimizer.skipped_spikes) == 0
    for _ in range(count or 1):
        run.step(100.0, SCALES)
    assert int(run.optimizer.skipped_spikes) == 1


# Unscaled, or added up, it would be infinite: Keras keeps the largest of several.
@pytest.mark.parametrize("scale, count", [(1.0, 2), (2.0**-10, None)])
def test_large_value_is_no_overflow(scale, count):
    run = Overwriting(scale, count)
    run.optimizer.record_overflows()
    for _ in range(count or 1):
        run.step(1.0, 3e38)
        assert run.optimizer.overflowed_variables() == []
    assert run.skipped == 0
    np.testing.assert_array_equal(run.values()[1], np.float32(3e38))


@with_and_without_scale
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_value_that_is_not_finite_skips_step_and_is_recorded(bad, scale):
    run = Overwriting(scale)
    run.optimizer.record_overflows()
    with run.unchanged():
        run.step(1.0, bad)
    assert run.skipped == 1
    assert run.optimizer.overflowed_variables() == run.weights[1:]


def test_step_with_values_alone_assigns_them():
    run = Overwriting()
    run.optimizer.record_steps(4)
    run.apply([None, ops.full((8,), 5.0)])
    np.testing.assert_array_equal(run.values()[1], 5.0)
    assert run.optimizer.read_record()["gradient_norm"] == [0.0]


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
    BACKEND == "tensorflow",
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
    # The kernel and the bias, without scales and their histories of 1024 values.
    assert layer.values == 4 * 3 + 3
