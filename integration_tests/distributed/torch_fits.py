"""The runs of Keras's `fit` in two PyTorch processes, and in one process.

With `DataParallel` each process has batches of its own, and one process takes the same
steps with both. With `ModelParallel` the processes of a row of the mesh take the same
batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

import keras_lso
from integration_tests.distributed import problem
from integration_tests.distributed.torch_training import state_of

EPOCHS, STEPS = 2, 12


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


def lars():
    return keras_lso.LARS(0.1, eeta=0.05, weight_decay_rate=0.01)


def accumulating():
    return adam(gradient_accumulation_steps=2)


class Fit(NamedTuple):
    """A run."""

    inner: Callable[[], Any]
    pattern: str = "random"
    # That of a `ModelParallel`: first the dimension of the batches.
    mesh: tuple[int, int] | None = None
    dtype: str = "float32"
    statistics: bool = False
    # Keras picks the batches of a process out of a `PyDataset` of all.
    shared_by_keras: bool = False
    # The second epoch is that of a new model, from the file of an `OrbaxCheckpoint`.
    is_resumed: bool = False
    # Otherwise `DataParallel` hands the weights of the first process to the other.
    starts_alike: bool = True


FITS = {
    "momentum": Fit(momentum, "first"),
    "adam": Fit(adam, starts_alike=False),
    "lars": Fit(lars),
    "clipped": Fit(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.5), "last"),
    "accumulating": Fit(accumulating),
    "resumed": Fit(adam, is_resumed=True),
    "of a data set": Fit(adam, "first", shared_by_keras=True),
    "statistics": Fit(adam, "first", statistics=True),
    "float16": Fit(adam, dtype="float16", starts_alike=False),
    "shards": Fit(adam, "first", (1, 2)),
    "shards, lars": Fit(lars, mesh=(1, 2)),
    "shards, float16": Fit(adam, dtype="float16", mesh=(1, 2)),
    "shards, accumulating": Fit(accumulating, mesh=(1, 2)),
    "shards of batches": Fit(adam, mesh=(2, 1)),
}
SHARDED = {".*first/kernel": (None, "model"), ".*first/bias": ("model",)}


class Recorder(keras.callbacks.Callback):
    """Records the variables of this process after each step."""

    def __init__(self):
        super().__init__()
        self.steps, self.statistics = [], []

    def on_train_batch_end(self, batch, logs=None):
        variables = self.model.trainable_variables
        self.steps.append(state_of(variables, self.model.optimizer))
        kept = self.model.non_trainable_variables
        self.statistics.append([np.array(v.value) for v in kept])


def set_distribution(fit):
    """Lets Keras distribute all models that are made after this."""
    shared = {"auto_shard_dataset": fit.shared_by_keras}
    distribution = keras.distribution.DataParallel(**shared)
    if fit.mesh is not None:
        mesh = keras.distribution.DeviceMesh(fit.mesh, ["batch", "model"])
        layouts = keras.distribution.LayoutMap(mesh)
        for path, axes in SHARDED.items():
            layouts[path] = axes
        distribution = keras.distribution.ModelParallel(layout_map=layouts, **shared)
    keras.distribution.set_distribution(distribution)


def make_model(fit, rank=0):
    layers = [
        keras.layers.Dense(problem.HIDDEN, "tanh", name="first", dtype=fit.dtype),
        keras.layers.Dense(problem.OUTPUTS, name="second", dtype=fit.dtype),
    ]
    if fit.statistics:
        layers.insert(1, keras.layers.BatchNormalization(name="statistics"))
    model = keras.Sequential([keras.Input((problem.INPUTS,)), *layers])
    values = problem.initial_weights()
    if rank and not fit.starts_alike:
        values = [value + rank for value in values]
    trained = [layer for layer in layers if layer.name != "statistics"]
    for layer, pair in zip(trained, (values[:2], values[2:]), strict=True):
        layer.set_weights(pair)
    optimizer = keras_lso.LossScaleOptimizer(
        fit.inner(), initial_scale=2.0**10, dynamic_growth_steps=3
    )
    model.compile(optimizer, loss="mse")
    return keras_lso.protect_statistics(model) if fit.statistics else model


def batches_of(fit, participants):
    """Returns the batches of some participants, joined: one for each step."""
    batches = [
        [problem.batch_of(fit.pattern, step, p, 2) for p in participants]
        for step in range(STEPS)
    ]
    joined = [map(np.concatenate, zip(*of_step, strict=True)) for of_step in batches]
    return [(x, y, weights[:, 0]) for x, y, weights in joined]


class Dataset(keras.utils.PyDataset):
    """The batches of all participants, one after the other."""

    def __init__(self, fit):
        super().__init__()
        of_each = [batches_of(fit, [participant]) for participant in range(2)]
        self.batches = [b for of_step in zip(*of_each, strict=True) for b in of_step]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def train(model, fit, participants, *callbacks, epochs=EPOCHS, **options):
    """Calls `fit` with the batches of some participants; returns its history."""
    batches = batches_of(fit, participants)
    x, y, weights = map(np.concatenate, zip(*batches, strict=True))
    data = {"x": x, "y": y, "sample_weight": weights, "batch_size": len(batches[0][0])}
    history = model.fit(
        **({"x": Dataset(fit)} if fit.shared_by_keras else data),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[keras_lso.callbacks.LossScaleMonitor(), *callbacks],
        **options,
    )
    return history.history


def train_alone(fit):
    """Returns the record of one process on the same batches, and its history."""
    recorder = Recorder()
    alone = fit._replace(mesh=None, shared_by_keras=False)
    history = train(make_model(alone), alone, range(2), recorder)
    return [np.stack(c) for c in zip(*recorder.steps, strict=True)], history
