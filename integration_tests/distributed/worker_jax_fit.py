"""One of two JAX processes of two devices each that call `fit` together.

    python -m integration_tests.distributed.worker_jax_fit RANK PORT FOLDER

For each of `jax_training.FITS` and each pattern, and for each of its devices, it writes
its variables after each step to `FOLDER/FIT-PATTERN-RANK-INDEX.npz`.
"""

import sys

import jax
import keras
import numpy as np

rank, port, folder = int(sys.argv[1]), *sys.argv[2:]
# How processes on CPUs communicate: JAX 0.5 has another default.
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)

from integration_tests.distributed import problem  # noqa: E402
from integration_tests.distributed.jax_meshes import (  # noqa: E402
    CPUS,
    NAMES,
    data_parallel,
    model_parallel,
)
from integration_tests.distributed.jax_training import FITS  # noqa: E402


class Network(keras.Model):
    """The network of `problem.py`, whose variables have the names of the layouts."""

    def build(self, input_shape):
        values = zip(problem.initial_weights(), NAMES, strict=True)
        self.values = [
            self.add_weight(
                shape=value.shape,
                initializer=lambda shape, dtype, value=value: value,
                name=name,
            )
            for value, name in values
        ]

    def call(self, x):
        return problem.predict(self.values, x)


class Recorder(keras.callbacks.Callback):
    """Records the variables on each device of this process after each step."""

    def __init__(self):
        super().__init__()
        self.steps = [[] for _ in jax.local_devices()]

    def on_train_batch_end(self, batch, logs=None):
        variables = [*self.model.trainable_variables, *self.model.optimizer.variables]
        for steps, device in zip(self.steps, jax.local_devices(), strict=True):
            steps.append([_held_by(device, v.value) for v in variables])


def _held_by(device, array):
    [data] = [s.data for s in array.addressable_shards if s.device == device]
    return np.array(data)


# A row of the mesh has a device of each process.
ROWS = np.reshape(CPUS, (2, 2)).T
DISTRIBUTIONS = {
    "data": lambda: data_parallel(CPUS, auto_shard_dataset=False),
    "tf.data": lambda: data_parallel(CPUS),
    "model": lambda: model_parallel(ROWS, auto_shard_dataset=False),
}


def dataset(fit, pattern):
    """Returns what this process hands to `fit`."""
    participants = FITS[fit]["participants"]
    batches = [
        problem.whole_batch(pattern, step, participants)
        for step in range(problem.STEPS)
    ]
    batches = [(x, y, weights[:, 0]) for x, y, weights in batches]
    if fit == "tf.data":
        import tensorflow as tf

        whole = [np.concatenate(part) for part in zip(*batches, strict=True)]
        size = participants * problem.BATCH_SIZE
        return tf.data.Dataset.from_tensor_slices(tuple(whole)).batch(size)
    if fit == "data":
        halves = [np.split(part, 2)[rank] for batch in batches for part in batch]
        batches = [tuple(halves[i : i + 3]) for i in range(0, len(halves), 3)]
    return (batch for batch in batches)


def train(fit):
    keras.distribution.set_distribution(DISTRIBUTIONS[fit]())
    model = Network()
    model.build((None, problem.INPUTS))
    model.compile(problem.make_optimizer(FITS[fit]["optimizer"]), "mse")
    model.optimizer.build(model.trainable_variables)
    variables = [*model.trainable_variables, *model.optimizer.variables]
    # `fit` donates the buffers of the variables.
    initial = [jax.numpy.copy(v.value) for v in variables]
    for pattern in FITS[fit]["patterns"]:
        for v, value in zip(variables, initial, strict=True):
            v.assign(jax.numpy.copy(value))
        recorder = Recorder()
        model.fit(
            dataset(fit, pattern),
            steps_per_epoch=problem.STEPS,
            verbose=0,
            callbacks=[recorder],
        )
        for i, steps in enumerate(recorder.steps):
            problem.save(f"{folder}/{fit}-{pattern}-{rank}-{i}.npz", steps)


for fit in FITS:
    train(fit)
jax.distributed.shutdown()
