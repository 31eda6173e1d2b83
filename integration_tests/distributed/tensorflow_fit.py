"""A model, data that overflow on chosen replicas, and `fit`, for worker and test."""

import contextlib

import keras
import numpy as np

import keras_lso
from integration_tests.distributed import problem

BATCH_SIZE = 8  # Of both replicas: the first has the first half.
BATCHES, EPOCHS = 6, 3
# At which batch of each epoch which rows overflow: on one replica, the other, both.
OVERFLOWS = {1: [2], 3: [5], 4: [0, 7]}
# What the model is made with.
WAYS = {
    "plain": {},
    "auto": {"jit_compile": "auto"},
    "slots": {"slot_dtype": "bfloat16"},
    "int8": {"slot_dtype": "int8", "units": 1024},
}
SKIPPED_AFTER = [n + 3 * e for e in range(EPOCHS) for n in (0, 1, 1, 2, 3, 3)]


def make_data(overflows):
    """Returns x and y; where y is large, its gradient overflows in float16 only."""
    random = np.random.default_rng(0)
    x = random.normal(scale=0.5, size=(BATCHES * BATCH_SIZE, 4)).astype("float32")
    y = x @ np.array([[0.5], [-0.75], [0.25], [0.5]], "float32")
    for batch, rows in overflows.items():
        for row in rows:
            y[batch * BATCH_SIZE + row] = 1e18
    return x, y


def make_model(
    wrapper=keras_lso.LossScaleOptimizer, jit_compile=False, units=8, **options
):
    """Returns a model under mixed_float16, always with the same weights."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        initial = [keras.initializers.GlorotUniform(seed=i) for i in range(2)]
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(units, "tanh", kernel_initializer=initial[0]),
                keras.layers.Dense(1, kernel_initializer=initial[1]),
            ]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    options |= {"initial_scale": 2.0**10, "dynamic_growth_steps": 2}
    optimizer = wrapper(keras.optimizers.Adam(0.01), **options)
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    return model


class Recorder(keras.callbacks.Callback):
    """Writes down what each replica holds after every batch."""

    def __init__(self, local_values):
        super().__init__()
        self.local_values = local_values
        self.recorded = []

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        variables = [*model.trainable_variables, *model.optimizer.variables]
        values = [self.local_values(v) for v in variables]
        self.recorded.append([list(r) for r in zip(*values, strict=True)])

    def save(self, path):
        for replica, states in enumerate(zip(*self.recorded, strict=True)):
            problem.save(f"{path} {replica}.npz", states)


def fit(model, callbacks=(), overflows=OVERFLOWS, epochs=EPOCHS):
    """Returns the history."""
    x, y = make_data(overflows)
    history = model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return history.history


def fit_and_read(path, scope=contextlib.nullcontext):
    """Returns what callbacks and the optimizer say of a run, and what a file holds.

    A dict that JSON can hold, and the norms of the gradients, which replicas round.
    """
    with scope():
        model = make_model()
    callbacks = keras_lso.callbacks.LossScaleMonitor(), keras_lso.callbacks.StepRecord()
    history, optimizer = fit(model, callbacks), model.optimizer
    model.save(path)
    with scope():
        loaded = keras_lso.load_model(path)
    states = [
        [v.numpy().tolist() for v in [*m.weights, *m.optimizer._state.variables]]
        for m in (model, loaded)
    ]
    columns = ("step", "outcome", "loss_scale", "learning_rate")
    found = {
        "logs": [history[name] for name in ("loss_scale", "skipped_steps")],
        "record": [[r[c] for c in columns] for r in history["step_record"]],
        "counts": [int(optimizer.skipped_steps), int(optimizer.iterations.numpy())],
        "scales": [float(optimizer.loss_scale), float(optimizer.scale_loss(2.0))],
        "weights": [list(np.shape(w)) for w in optimizer.get_weights()],
        "config": optimizer.get_config(),
        "is loaded": states[0] == states[1],
    }
    return found, history["gradient_norm_median"] + history["gradient_norm_max"]
