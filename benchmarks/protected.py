"""What `protect_statistics` adds to a batch in `fit`: a convnet that has many of them.

In float32: a convolution in float16 takes a CPU a hundred times as long, and beside it
no protection would show.
"""

from functools import partial

import keras
import numpy as np
from keras import layers

import keras_lso
from benchmarks.fit import BATCHES, clock_of, timed

NORMALIZATIONS = 50
# Name: role, what is done to the compiled model.
ROWS = {
    "keras_lso": ("unprotected", lambda model: model),
    "with protect_statistics": ("protected", keras_lso.protect_statistics),
}
# For each that is asked for: the difference is less than a busy machine's from one
# median to the next.
_ROUNDS = 3


def convnet(normalizations, channels=16, size=16, batch=32):
    """A convnet with as many BatchNormalizations, and images chosen at random."""
    inputs = x = keras.Input((size, size, 3))
    for _ in range(normalizations):
        x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCHES * batch, size, size, 3)).astype("float32")
    labels = random.integers(10, size=len(images))
    return keras.Model(inputs, outputs), images, labels, batch


def measure(rounds, smoke=False):
    """Returns the time that `fit` takes for a batch, for each of `ROWS`."""
    normalizations = 2 if smoke else NORMALIZATIONS
    batches = 2 if smoke else BATCHES
    clocks = {}
    for row, (_, prepare) in ROWS.items():
        clocks[row], _ = clock_of(
            partial(convnet, normalizations),
            "float32",
            keras_lso.LossScaleOptimizer,
            (),
            batches,
            prepare,
        )
    rows = timed(clocks, ROWS, batches, rounds * _ROUNDS)
    return {"normalizations": normalizations, "rows": rows}
