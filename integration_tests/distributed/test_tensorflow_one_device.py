"""Strategies of one device, as on every machine with one GPU.

Each run equals the one without a strategy, bit for bit. Accumulation and averages,
whose steps branch, work inside our optimizer, although they fail in Keras's alone.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_lso

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

K = keras.optimizers
INNER = {
    "Adam": lambda: K.Adam(0.1, global_clipnorm=0.5),
    "RMSprop": lambda: K.RMSprop(0.1),
    "LARC": lambda: keras_lso.LARC(K.SGD(0.1, momentum=0.9)),
    "averages": lambda: K.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: K.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}
STRATEGIES = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(["/cpu:0"]),
    "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "default": tf.distribute.get_strategy,
}
OVERFLOW = 2


def train(strategy, inner, dtype, in_function):
    """Returns the weights and the variables of the optimizer after each step."""
    random = np.random.default_rng(0)
    start = [random.normal(size=size).astype(dtype) for size in ((2, 3), 2)]
    with strategy.scope():
        weights = [keras.Variable(w, dtype=dtype) for w in start]
        optimizer = keras_lso.LossScaleOptimizer(
            INNER[inner](), initial_scale=4.0, dynamic_growth_steps=2
        )
        if not in_function:
            optimizer.build(weights)

    def run(*grads):
        strategy.run(lambda *own: optimizer.apply(list(own), weights), args=grads)

    step = tf.function(run, autograph=False) if in_function else run
    recorded = []
    for i in range(5):
        grads = [random.normal(size=w.shape).astype(dtype) for w in start]
        if i == OVERFLOW:
            grads[1][1] = np.inf
        step(*map(tf.constant, grads))
        state = [*weights, *optimizer.variables]
        recorded.append([v.numpy().tobytes() for v in state])
    return recorded


@pytest.mark.parametrize("in_function", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("inner", INNER)
def test_strategies_of_one_device_train_like_no_strategy(inner, dtype, in_function):
    mirrored, *others = (
        train(make(), inner, dtype, in_function) for make in STRATEGIES.values()
    )
    assert all(other == mirrored for other in others)
    assert mirrored[OVERFLOW][:2] == mirrored[OVERFLOW - 1][:2] != mirrored[-1][:2]
