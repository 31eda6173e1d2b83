"""A model with moving statistics, and batches of which some overflow on one replica."""

import keras
import numpy as np

import keras_lso

BATCH_SIZE, BATCHES = 8, 4
# At which batch which example overflows: one of the last replica, one of the first.
OVERFLOWS = {1: 7, 2: 0}
KEPT = ("moving_mean", "moving_variance", "vector_u")


def make_data(overflows):
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES * BATCH_SIZE, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    for batch, row in overflows.items():
        x[batch * BATCH_SIZE + row] = np.inf
    return x, y


def make_model(synchronized=False):
    """Returns a compiled model, always with the same weights."""
    keras.utils.set_random_seed(0)
    options = {"synchronized": True} if synchronized else {}
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.BatchNormalization(**options),
            keras.layers.SpectralNormalization(keras.layers.Dense(4)),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mse", jit_compile="auto")
    return model


class Recorder(keras.callbacks.Callback):
    """Writes down what each replica holds before `fit` and after every batch.

    Args:
        local_values: Callable, which returns a variable's values on the replicas.
    """

    def __init__(self, local_values):
        super().__init__()
        self.local_values = local_values
        self.recorded = []

    def record(self):
        kept = [v for v in self.model.non_trainable_variables if v.name in KEPT]
        self.recorded.append(
            [[np.asarray(x).tolist() for x in self.local_values(v)] for v in kept]
        )

    def on_train_begin(self, logs=None):
        self.record()

    def on_train_batch_end(self, batch, logs=None):
        self.record()


def record(model, local_values):
    """Returns the values on the replicas before the first step and after each."""
    recorder = Recorder(local_values)
    x, y = make_data(OVERFLOWS)
    model.fit(
        x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0, callbacks=[recorder]
    )
    return recorder.recorded


def check(protected, unprotected):
    """Asserts that the skipped steps, and only those, left what they found."""
    assert len(protected) == BATCHES + 1
    names = range(len(KEPT))
    for step in range(BATCHES):
        for i in names:
            before, after = protected[step][i], protected[step + 1][i]
            assert (before == after) is (step in OVERFLOWS), (step, KEPT[i])
            assert np.isfinite(np.array(after)).all()
    # It is the overflows that are restored, on some replica at least.
    first = min(OVERFLOWS) + 1
    for i in names[:2]:
        assert not np.isfinite(np.array(unprotected[first][i])).all()
