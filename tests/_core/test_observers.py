"""What is recorded of steps does not change them, whatever the gradients are."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.beside_keras import SHAPES, bits

K = keras.optimizers
# Rates so small that gradients of 1e38 leave weights finite.
MAKES = {
    "sgd": lambda **more: K.SGD(1e-38, momentum=0.9, **more),
    "adam": lambda **more: K.Adam(1e-3, epsilon=1e-30, **more),
    "lars": lambda **more: keras_lso.LARS(1e-3, **more),
    "lamb": lambda **more: K.Lamb(1e-3, **more),
    "adadelta": lambda **more: K.Adadelta(1.0, **more),
}
OPTIONS = {
    "plain": {},
    "window": {"gradient_accumulation_steps": 3},
    "clipped": {"global_clipnorm": 1.0},
    "clipped each": {"clipnorm": 1.0},
    "averaged": {"use_ema": True, "ema_overwrite_frequency": 2},
}
# It judges each norm, and calls none an outlier.
GUARD = keras_lso.SpikeGuard(threshold=1e38, window=4, warmup=2)
OBSERVERS = {
    "record": lambda optimizer: optimizer.record_steps(64),
    "overflows": lambda optimizer: optimizer.record_overflows(),
    "guard": lambda optimizer: None,
}


def history(seed, steps=14):
    """Gradients of each step, as arrays: of any magnitude, some of them not finite."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        size = 10.0 ** random.choice(
            [-36, -30, -22, -10, 0, 10, 16, 18.3, 19.3, 30, 38]
        )
        values = [random.uniform(-1, 1, size=s) * size for s in SHAPES]
        if random.random() < 0.2:
            values[random.integers(len(values))].flat[0] = random.choice(
                [np.inf, np.nan]
            )
        yield [v.astype("float32") for v in values]


@functools.cache
def trained(way, make, options, cls, observer=None):
    """The bits of all that a run leaves, but for what the observer keeps."""
    random = np.random.default_rng(0)
    weights = [keras.Variable(random.normal(size=s).astype("float32")) for s in SHAPES]
    told = {"spike_guard": GUARD} if observer == "guard" else {}
    optimizer = cls(MAKES[make](**OPTIONS[options]), **told)
    optimizer.build(weights)
    if observer is not None:
        OBSERVERS[observer](optimizer)
    for grads in history(sorted(OPTIONS).index(options)):
        grads = [ops.convert_to_tensor(g) for g in grads]
        optimizer.apply(grads, weights, scaled=True)
    counts = [optimizer.loss_scale, optimizer.skipped_steps, optimizer.iterations]
    return bits([*weights, *optimizer.inner_optimizer.variables, *counts])


@pytest.mark.parametrize(
    "cls", [keras_lso.LossScaleOptimizer, keras_lso.GuardedOptimizer]
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.exhaustive
def test_observed_run_is_bitwise_equal(observer, make, options, cls, way):
    run = way, make, options, cls
    assert trained(*run, observer) == trained(*run)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_guard_skips_outliers_among_norms_of_any_size(size):
    weight = keras.Variable(np.ones(5, "float32"))
    guard = keras_lso.SpikeGuard(window=8, warmup=4)
    optimizer = keras_lso.GuardedOptimizer(K.SGD(1e-30), spike_guard=guard)
    for times in (1.0, 1.1, 0.9, 1.0, 1.1, 30.0, 1.0):
        optimizer.apply([ops.full((5,), times * size)], [weight])
    assert int(optimizer.skipped_spikes) == int(optimizer.skipped_steps) == 1


def test_norm_beyond_float32_does_not_blind_guard():
    """The gradients are finite, and their norm is not."""
    weight = keras.Variable(np.ones(200, "float32"))
    guard = keras_lso.SpikeGuard(window=8, warmup=4)
    optimizer = keras_lso.GuardedOptimizer(K.SGD(1e-38), spike_guard=guard)
    for gradient in (1.0, 3e38, *[1.0] * 8, 3e38):
        optimizer.apply([ops.full((200,), gradient)], [weight])
    # In the warm-up it is applied.
    assert int(optimizer.skipped_spikes) == 1
