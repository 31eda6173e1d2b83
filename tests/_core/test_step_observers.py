"""Recording and judging steps does not change them, whatever the gradients are."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import SHAPES, Harness, bits

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
    "accumulated": {"gradient_accumulation_steps": 3},
    "clipped": {"global_clipnorm": 1.0},
    "clipped each": {"clipnorm": 1.0},
    "averaged": {"use_ema": True, "ema_overwrite_frequency": 2},
}
# It judges each norm, and finds no outlier.
GUARD = keras_lso.SpikeGuard(threshold=1e38, window=4, warmup=2)
OBSERVERS = {
    "record": lambda optimizer: optimizer.record_steps(64),
    "overflows": lambda optimizer: optimizer.record_overflows(),
    "guard": lambda optimizer: None,
}


def history(seed, steps=14):
    """Yields the gradients of each step: of any magnitude, some not finite."""
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
def trained(way, make, options, cls, observer=None, dtype="float32", **arguments):
    """Returns the bits of a trained harness, without the observer's variables."""
    if observer == "guard":
        arguments["spike_guard"] = GUARD
    run = Harness(cls(MAKES[make](**OPTIONS[options]), **arguments), dtype=dtype)
    if observer is not None:
        OBSERVERS[observer](run.optimizer)
    for grads in history(sorted(OPTIONS).index(options)):
        run.apply([ops.convert_to_tensor(g) for g in grads])
    optimizer = run.optimizer
    counts = [optimizer.loss_scale, optimizer.skipped_steps, optimizer.iterations]
    return bits([*run.state, *counts])


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["float32", "remainder", "remainder8", "stochastic"])
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.exhaustive
def test_observed_run_with_masters_and_narrow_slots_is_bitwise_equal(
    observer, kind, dtype, way
):
    run = way, "adam", "plain", keras_lso.LossScaleOptimizer
    stored = {"dtype": dtype, "master_weights": kind, "slot_dtype": "bfloat16"}
    assert trained(*run, observer, **stored) == trained(*run, **stored)


GUARDED = {
    # Of any size, the one that is 30 times as large is an outlier.
    **{
        size: (5, 1e-30, np.array([1.0, 1.1, 0.9, 1.0, 1.1, 30.0, 1.0]) * size)
        for size in (1e-30, 1.0, 1e25)
    },
    # Finite gradients whose norm is not, and which are applied in the warm-up.
    "beyond float32": (200, 1e-38, [1.0, 3e38, *[1.0] * 8, 3e38]),
}


@pytest.mark.parametrize(
    "length, rate, gradients", GUARDED.values(), ids=map(str, GUARDED)
)
def test_guard_skips_one_outlier_among_norms_of_any_size(length, rate, gradients):
    guard = keras_lso.SpikeGuard(window=8, warmup=4)
    optimizer = keras_lso.GuardedOptimizer(K.SGD(rate), spike_guard=guard)
    run = Harness(optimizer, [(length,)])
    for value in gradients:
        run.apply([ops.full((length,), value)])
    assert int(optimizer.skipped_spikes) == run.skipped == 1
