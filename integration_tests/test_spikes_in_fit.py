"""A `SpikeGuard` in `fit`, however a step is compiled, by a model in NumPy float64."""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso.callbacks import StepRecord
from testing.spikes import Model

BACKEND = keras.backend.backend()
BATCHES, SIZE, RATE = 40, 8, 0.05
SPIKES, OVERFLOW = (20, 31), 25
GUARD = keras_lso.SpikeGuard(6.0, window=16, warmup=8)

MODES = [
    {"jit_compile": True},
    {"jit_compile": False},
    {"jit_compile": True, "steps_per_execution": 4},
    {"run_eagerly": True},
]
# `torch.compile` takes a minute, and PyTorch executes one step at a time.
ON_PYTORCH = [
    pytest.param({"jit_compile": True}, marks=pytest.mark.full),
    {"jit_compile": False},
]


def make_data():
    random = np.random.default_rng(0)
    x = random.uniform(0.5, 1.5, (BATCHES, SIZE, 3)).astype("float32")
    # Noise keeps the gradients of good batches of one size.
    y = x.sum(-1, keepdims=True) + random.choice([-1.0, 1.0], (BATCHES, SIZE, 1))
    y[list(SPIKES)] += 1e4
    x[OVERFLOW] = np.inf
    return x, y.astype("float32")


def trained_by_numpy(x, y):
    """Returns the weights at the end, and what becomes of each step."""
    judge, weights, outcomes = Model(GUARD), np.zeros((3, 1)), []
    for i, (of_x, of_y) in enumerate(zip(x, y, strict=True)):
        if i == OVERFLOW:
            outcomes.append("overflow")
            continue
        of_x, of_y = of_x.astype("float64"), of_y.astype("float64")
        gradient = 2 * of_x.T @ (of_x @ weights - of_y) / SIZE
        applies = judge.applies(np.sqrt((gradient**2).sum()))
        outcomes.append("applied" if applies else "spike")
        weights -= RATE * gradient if applies else 0.0
    return weights, outcomes


@pytest.mark.parametrize("mode", ON_PYTORCH if BACKEND == "torch" else MODES, ids=str)
def test_fit_skips_spike_and_leaves_loss_scale_unchanged(mode):
    x, y = make_data()
    inner = keras.optimizers.SGD(RATE)
    optimizer = keras_lso.LossScaleOptimizer(
        inner, initial_scale=256.0, spike_guard=GUARD
    )
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(optimizer, loss="mse", **mode)
    history = model.fit(
        x.reshape(-1, 3),
        y.reshape(-1, 1),
        batch_size=SIZE,
        shuffle=False,
        verbose=0,
        callbacks=[StepRecord()],
    )
    [record] = history.history["step_record"]
    weights, outcomes = trained_by_numpy(x, y)
    assert outcomes.count("spike") == len(SPIKES)
    assert record["outcome"] == outcomes
    assert optimizer.skipped_spikes == len(SPIKES)
    assert optimizer.skipped_steps == len(SPIKES) + 1
    assert optimizer.loss_scale == 128.0
    # Each of 40 steps rounds weights of about 1 to 24 bits.
    np.testing.assert_allclose(dense.get_weights()[0], weights, rtol=1e-5)
