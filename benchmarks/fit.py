"""`fit`, end to end: what is left of the difference in a small model's training."""

import contextlib
import time

import keras
import numpy as np
from keras import layers, ops

import keras_lso
from benchmarks.inner import ADAM_RATE
from benchmarks.timing import summarize, time_in_turn

BATCHES = 5
"""Batches of an epoch, over which a round takes the mean."""

HALF = "mixed_float16"
MONITOR = keras_lso.callbacks.LossScaleMonitor
# Name: role, dtype policy, wrapper, callbacks.
ROWS = {
    "float32, no wrapper": ("inner", "float32", lambda inner: inner, ()),
    "Keras's wrapper": ("keras", HALF, keras.optimizers.LossScaleOptimizer, ()),
    "keras_lso": ("ours", HALF, keras_lso.LossScaleOptimizer, ()),
    "with a monitor": ("monitored", HALF, keras_lso.LossScaleOptimizer, (MONITOR,)),
}


def digits_cnn():
    """A convolutional classifier of scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images / 16).astype("float32")[..., None]
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, activation="relu")(inputs)
    x = layers.Conv2D(32, 3, activation="relu")(x)
    x = layers.Flatten()(x)
    x = layers.Dense(64, activation="relu")(x)
    outputs = layers.Dense(10, dtype="float32")(x)
    return keras.Model(inputs, outputs), images, data.target, 128


def transformer(length=32, width=64, heads=4, blocks=2, characters=96):
    """A Transformer that predicts the next of some characters, chosen at random."""
    text = np.random.default_rng(0).integers(characters, size=(32 * BATCHES, length))
    text = text.astype("int32")
    inputs = keras.Input((length,), dtype="int32")
    places = ops.cumsum(ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(characters, width)(inputs)
    x = x + layers.Embedding(length, width)(places)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        # Who asks for the scores gets Keras's plain attention: JAX's fused one has no
        # float16 on a CPU.
        attended, _ = layers.MultiHeadAttention(heads, width // heads)(
            normal, normal, use_causal_mask=True, return_attention_scores=True
        )
        x = x + attended
        normal = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="relu")(normal))
    x = layers.LayerNormalization()(x)
    outputs = layers.Dense(characters, dtype="float32")(x)
    return keras.Model(inputs, outputs), text, np.roll(text, -1, axis=1), 32


def many_small(depth=12, width=256, batch=16):
    """Layers so small that a step pays for kernels, not for bytes; random data."""
    random = np.random.default_rng(0)
    inputs = x = keras.Input((width,))
    for _ in range(depth - 1):
        x = layers.Dense(width, activation="relu")(x)
    outputs = layers.Dense(width, dtype="float32")(x)
    data = random.normal(size=(batch * BATCHES, width)).astype("float32")
    classes = random.integers(width, size=batch * BATCHES)
    return keras.Model(inputs, outputs), data, classes, batch


MODELS = {
    "digits CNN": digits_cnn,
    "small Transformer": transformer,
    "many small": many_small,
}
NEEDS = {"digits CNN": "sklearn"}
"""The package that a model's data are from."""


class Stopwatch(keras.callbacks.Callback):
    """Takes the time of an epoch, without what `fit` does before and after it.

    Its losses are read before `on_epoch_end`: nothing is running any more.
    """

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self.start


def measure(name, rounds, smoke=False):
    """Returns the time that `fit` takes for a batch, for each of `ROWS`."""
    batches = 2 if smoke else BATCHES
    clocks = {}
    for row, (_, policy, wrap, callbacks) in ROWS.items():
        clocks[row], model = clock_of(MODELS[name], policy, wrap, callbacks, batches)
    tensors = model.trainable_variables
    return {
        "model": name,
        "tensors": len(tensors),
        "parameters": model.count_params(),
        "rows": timed(clocks, ROWS, batches, rounds),
    }


def timed(clocks, rows, batches, rounds, first=contextlib.nullcontext):
    """Returns the times of some clocks: of their first epochs, and of a batch.

    `rows` has a tuple for each clock, whose role comes first. `first` makes the context
    of a first epoch.
    """
    results = []
    for name, clock in clocks.items():
        with first():
            first_s = clock() * batches
        results.append({"name": name, "role": rows[name][0], "first_s": first_s})
    seconds = time_in_turn(clocks, rounds, warmup=1)
    return [row | summarize(seconds[row["name"]]) for row in results]


def clock_of(
    make_model, policy, wrap, callbacks, batches, prepare=lambda model: model, **options
):
    """Returns a function that fits an epoch and returns the seconds of a batch.

    `options` are further arguments of `compile`.
    """
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, x, y, size = make_model()
    finally:
        keras.config.set_dtype_policy(before)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(keras.optimizers.Adam(ADAM_RATE)), loss, **options)
    prepare(model)
    x, y = x[: size * batches], y[: size * batches]
    stopwatch = Stopwatch()
    # Last: what the others do at the end of an epoch is a part of it.
    callbacks = [*(make() for make in callbacks), stopwatch]

    def clock():
        model.fit(x, y, batch_size=size, verbose=0, callbacks=callbacks)
        return stopwatch.seconds / batches

    return clock, model
