"""Trains on the devices of one JAX process, in each way.

    python -m integration_tests.distributed.worker_jax_devices FOLDER

For each of `WAYS`, optimizer and pattern the state after every step is written to
`FOLDER/WAY-OPTIMIZER-PATTERN-INDEX.npz`: once for each device, or for each group of
devices that together hold a whole model.
"""

import functools
import sys

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from integration_tests.distributed import jax_meshes, jax_training, problem
from integration_tests.distributed.jax_meshes import (
    CPUS,
    DEVICES,
    data_parallel,
    model_parallel,
)
from integration_tests.distributed.jax_training import (
    AXIS,
    HAS_SHARD_MAP,
    OPTIMIZERS,
    PARTICIPANTS,
    Training,
)


class OneOfMany(Training):
    """The gradients are those of this device's batch: `axis_name` averages them."""

    axis_name = AXIS


class OfOwnCopy(OneOfMany):
    """In a `jax.shard_map` that takes own copies of the weights to differentiate by."""

    def gradients(self, trainable, own, batch):
        copies = jax.lax.pcast(trainable, AXIS, to="varying")
        return super().gradients(copies, own, batch)


class OfMeanLoss(Training):
    """The gradients are reduced already: they are those of the mean of all losses."""

    def loss(self, trainable, own, batch):
        return jax.lax.pmean(super().loss(trainable, own, batch), AXIS)


class Averaged(Training):
    """The gradients are reduced already, by the loop itself."""

    def gradients(self, *args):
        return jax.lax.pmean(super().gradients(*args), AXIS)


class Shards(Training):
    """Each device keeps a shard of what can be split in four, and of its slots.

    To Keras a shard is all that there is of a variable.
    """

    def __init__(self, name):
        super().__init__(name)
        whole = self.state
        self.variables = [
            keras.Variable(_shard(w), name=w.name) for w in self.variables
        ]
        self.optimizer = problem.make_optimizer(name)
        self.optimizer.build(self.variables)
        self.state = whole

    def gradients(self, trainable, own, batch):
        axes = [_split_axis(w) for w in problem.initial_weights()]
        copies = [
            jax.lax.pcast(w, AXIS, to="varying")
            if axis is None
            else jax.lax.all_gather(w, AXIS, axis=axis, tiled=True)
            for w, axis in zip(trainable, axes, strict=True)
        ]
        grads = super().gradients(copies, own, batch)
        return [
            jax.lax.pmean(g, AXIS)
            if axis is None
            else jax.lax.psum_scatter(g, AXIS, scatter_dimension=axis, tiled=True) / 4
            for g, axis in zip(grads, axes, strict=True)
        ]


def _split_axis(value):
    return next((i for i, n in enumerate(value.shape) if n == 4), None)


def _shard(value):
    axis = _split_axis(value)
    return value if axis is None else np.split(value, 4, axis)[0]


def _spec(value, is_split):
    return P(*[AXIS if is_split and n == 4 else None for n in value.shape])


def shard_map(training, check_vma=True):
    mesh = Mesh(jax.devices()[:4], AXIS)
    is_split = isinstance(training, Shards)
    specs = jax.tree.map(lambda value: _spec(value, is_split), training.state)
    return jax.jit(
        jax.shard_map(
            training.steps,
            mesh=mesh,
            in_specs=(specs, P(None, AXIS)),
            out_specs=jax.tree.map(lambda spec: P(None, *spec), specs),
            check_vma=check_vma,
        )
    ), NamedSharding(mesh, P(None, AXIS))


def pmap(training):
    mapped = jax.pmap(
        training.steps,
        AXIS,
        in_axes=(None, 1),
        # As if it were one array with a copy on each device.
        out_axes=None,
        devices=jax.devices()[:4],
    )

    def call(state, batches):
        return mapped(state, [b.reshape(len(b), 4, -1, b.shape[-1]) for b in batches])

    return call, None


def jit(training):
    layout = keras.distribution.distribution().get_data_layout((1, 1)).backend_layout
    return jax.jit(training.steps), NamedSharding(layout.mesh, P(None, *layout.spec))


def one_each(devices):
    return [[device] for device in devices]


EACH_OF_FOUR = one_each(DEVICES[:4])
ROWS = [DEVICES[:2], DEVICES[2:4]]
unchecked = functools.partial(shard_map, check_vma=False)

# For each way: the distribution of Keras, what trains, what lets it run on several
# devices, and the groups of devices that hold a whole model.
WAYS = {
    "data": (data_parallel(CPUS[:4]), Training, jit, EACH_OF_FOUR),
    "data on 8": (data_parallel(CPUS), Training, jit, one_each(DEVICES)),
    "model": (model_parallel(np.reshape(CPUS[:4], (2, 2))), Training, jit, ROWS),
    "shard_map": (None, OfOwnCopy, shard_map, EACH_OF_FOUR),
    "shard_map, unchecked": (None, OneOfMany, unchecked, EACH_OF_FOUR),
    "shard_map, reduced": (None, OfMeanLoss, shard_map, EACH_OF_FOUR),
    "shard_map, shards": (None, Shards, shard_map, [DEVICES[:4]]),
    "pmap": (None, OneOfMany, pmap, EACH_OF_FOUR),
    "pmap, reduced": (None, Averaged, pmap, EACH_OF_FOUR),
}


def train(way, folder):
    distribution, cls, transform, groups = WAYS[way]
    keras.distribution.set_distribution(distribution)
    for name in OPTIMIZERS[way]:
        training = cls(name)
        run, layout = transform(training)
        for pattern in problem.patterns_of(name):
            batches = jax_training.batches(pattern, PARTICIPANTS[way])
            states = run(training.state, jax.device_put(batches, layout))
            for i, devices in enumerate(groups):
                path = f"{folder}/{way}-{name}-{pattern}-{i}.npz"
                jax_meshes.save(path, states, devices)


for way in WAYS:
    if HAS_SHARD_MAP or not way.startswith("shard_map"):
        train(way, sys.argv[1])
