"""Moving statistics in `fit`, when a batch overflows in the forward pass.

Without protection they stay NaN, with Keras's wrapper, with ours and with PyTorch's
`GradScaler` (pytorch#88474).
"""

import keras
import numpy as np
import pytest

import keras_lso
from testing.keras_versions import takes_several_steps
from testing.tiers import full_but_for

BACKEND = keras.backend.backend()
BATCH_SIZE, BATCHES = 8, 6
SKIPPED = (1, 4)
SCALE = 2.0**8
MODES = {
    "jit_compile=True": {"jit_compile": True},
    "jit_compile=False": {"jit_compile": False},
    "run_eagerly=True": {"run_eagerly": True},
    "steps_per_execution=3": {"steps_per_execution": 3},
}
if not takes_several_steps:
    del MODES["steps_per_execution=3"]
# `torch.compile` takes a minute. Eager JAX compiles each operation on its own.
TAKE_LONG = {
    "tensorflow": set(),
    "jax": {"jit_compile=False", "run_eagerly=True"},
    "torch": {"jit_compile=True"},
}[BACKEND]


def make_model():
    """Always the same, in float16: a reading of 1e6 overflows in its first layer."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, kernel_initializer=uniform(0)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1, "linear", kernel_initializer=uniform(1)),
            ]
        )
    finally:
        keras.config.set_dtype_policy(before)


def uniform(seed):
    return keras.initializers.GlorotUniform(seed=seed)


def ours(inner, **options):
    # A fixed scale: no step depends on which ones were skipped before.
    return keras_lso.LossScaleOptimizer(
        inner, dynamic=False, initial_scale=SCALE, **options
    )


def keras_own(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE)


def compile_(model, wrap=ours, **options):
    model.compile(wrap(keras.optimizers.SGD(0.01)), loss="mse", **options)
    return model


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES * BATCH_SIZE, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def with_overflows(x):
    x = x.copy()
    for batch in SKIPPED:
        # One reading in one example of the batch.
        x[batch * BATCH_SIZE + 3, 2] = 1e6
    return x


def without_the_skipped(array):
    batches = np.split(array, BATCHES)
    return np.concatenate([b for i, b in enumerate(batches) if i not in SKIPPED])


def fit(model, x, y, **options):
    return model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0, **options)


def statistics_of(model):
    return [np.array(v.numpy()) for v in model.non_trainable_variables]


@pytest.mark.parametrize("wrap", [keras_own, ours], ids=["Keras's", "ours"])
def test_unprotected_statistics_keep_validation_loss_nan(wrap, data):
    x, y = data
    model = compile_(make_model(), wrap)
    fit(model, with_overflows(x), y)
    # The steps were skipped, and the weights are safe.
    assert int(model.optimizer.iterations) == BATCHES - len(SKIPPED)
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
    # Training on good batches goes on as if nothing were wrong, and repairs nothing.
    history = fit(model, x, y, validation_data=data)
    assert np.isfinite(history.history["loss"]).all()
    assert np.isnan(history.history["val_loss"]).all()
    mean, variance = statistics_of(model)
    assert not np.isfinite(mean).any()
    assert np.isnan(variance).any()


@pytest.mark.parametrize("mode", full_but_for(MODES.keys() - TAKE_LONG, MODES))
def test_protected_model_matches_run_without_skipped_batches(mode, data, bits):
    x, y = data
    model = compile_(make_model(), **MODES[mode])
    keras_lso.protect_statistics(model)
    history = fit(model, with_overflows(x), y, validation_data=data)
    assert np.isfinite(history.history["val_loss"]).all()
    assert int(model.optimizer.skipped_steps) == len(SKIPPED)

    twin = compile_(make_model(), **MODES[mode])
    keras_lso.protect_statistics(twin)
    fit(twin, *map(without_the_skipped, (x, y)))
    assert bits(model.weights) == bits(twin.weights)
