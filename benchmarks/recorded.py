"""What a `StepRecord` adds to a batch in `fit`: a network of many small layers.

In float32, in which a step takes a CPU the least time. Clipped by the norm of all
gradients, which a record then takes over, and not clipped.
"""

import keras
import numpy as np

import keras_lso
from benchmarks.fit import BATCHES, MODELS, clock_of, timed
from benchmarks.inner import ADAM_RATE

RECORD = keras_lso.callbacks.StepRecord
# Name: role, arguments of the inner optimizer, callbacks.
ROWS = {
    "clipped": ("clipped", {"global_clipnorm": 1.0}, ()),
    "clipped, recorded": ("clipped, recorded", {"global_clipnorm": 1.0}, (RECORD,)),
    "not clipped": ("plain", {}, ()),
    "not clipped, recorded": ("recorded", {}, (RECORD,)),
}
# Times the batches of `fit.py`: an epoch reads the record once, as 512 steps do.
_REPEATS = 20


def measure(rounds, smoke=False):
    """Returns the time that `fit` takes for a batch, for each of `ROWS`."""
    repeats = 1 if smoke else _REPEATS

    def make_model():
        model, data, classes, batch = MODELS["many small"]()
        data, classes = (np.concatenate([a] * repeats) for a in (data, classes))
        return model, data, classes, batch

    clocks, batches = {}, repeats * BATCHES
    for row, (_, told, callbacks) in ROWS.items():
        # In place of the Adam that `clock_of` has made.
        wrap = lambda _, told=told: keras_lso.LossScaleOptimizer(  # noqa: E731
            keras.optimizers.Adam(ADAM_RATE, **told)
        )
        clocks[row], _ = clock_of(make_model, "float32", wrap, callbacks, batches)
    return {"batches": batches, "rows": timed(clocks, ROWS, batches, rounds)}
