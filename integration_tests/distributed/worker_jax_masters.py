"""Trains with bfloat16 weights or slots on four devices of one JAX process, each way.

    python -m integration_tests.distributed.worker_jax_masters

Prints whether each has the bits of a step on one device; see `test_jax_masters.py`.
"""

import json

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import keras_lso
from integration_tests.distributed.jax_meshes import (
    CPUS,
    DEVICES,
    NAMES,
    model_parallel,
)
from integration_tests.distributed.jax_training import AXIS, HAS_SHARD_MAP

# The dtype of the weights, and the arguments of the wrapper.
KINDS = {
    "remainder": ("bfloat16", {"master_weights": "remainder"}),
    "remainder8": ("bfloat16", {"master_weights": "remainder8"}),
    "stochastic": ("bfloat16", {"master_weights": "stochastic"}),
    "slots": ("float32", {"slot_dtype": "bfloat16"}),
    "int8": ("float32", {"slot_dtype": "int8"}),
    "all in 24 bits": (
        "bfloat16",
        {"master_weights": "remainder8", "slot_dtype": "int8"},
    ),
}
# Names by which `model_parallel` shards, and shapes whose rows four devices can share.
# A quarter of the first has slots in 8 bits, and so has half of the third.
SHAPES = dict(zip(NAMES, [(128, 128), (8,), (64, 64), (12,)], strict=True))
SHARDED_ROWS = [True, True, False, False]


class Run:
    """Stateless steps on weights, with the same gradients in every run.

    To Keras the first weights are the rows of one of `parts` devices.
    """

    def __init__(self, kind, parts=1):
        random = np.random.default_rng(0)
        self.dtype, options = KINDS[kind]
        self.weights = []
        for (path, shape), has_parts in zip(SHAPES.items(), SHARDED_ROWS, strict=True):
            value = (random.normal(size=shape) * 0.5).astype("float32")
            own = value[: shape[0] // parts] if has_parts else value
            self.weights.append(keras.Variable(own, dtype=self.dtype, name=path))
        self.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=4.0, **options
        )
        self.optimizer.build(self.weights)
        dtypes = {v.dtype for v in self.optimizer.variables}
        assert ("uint8" in dtypes) == (options.get("slot_dtype") == "int8")

    def step(self, state, grads):
        weights, own = state
        return self.optimizer.stateless_apply(own, grads, weights, scaled=True)

    def gradients(self):
        """Lists of gradients; the fourth overflows in a row of the third device."""
        random = np.random.default_rng(1)
        for i in range(6):
            grads = [random.normal(size=s).astype("float32") for s in SHAPES.values()]
            if i == 3:
                grads[0][5, 0] = np.inf
            yield [jnp.asarray(g).astype(self.dtype) for g in grads]

    def state(self):
        """Returns the values of the weights and of the optimizer's variables."""
        variables = self.weights, self.optimizer.variables
        return tuple([v.value for v in of_one] for of_one in variables)


def train(run, step):
    """Returns the weights and the optimizer's variables after the steps."""
    state = jax.tree.map(jnp.copy, run.state())
    for grads in run.gradients():
        state = step(state, grads)
    return state


def jitted(kind):
    run = Run(kind)
    return train(run, jax.jit(run.step))


def sharded(kind, parts=4):
    """Each device has rows of the first weights, and of their slots and masters."""
    whole, run, mesh = Run(kind), Run(kind, parts), Mesh(DEVICES[:4], AXIS)
    pairs = whole.state(), run.state()
    specs = jax.tree.map(
        lambda w, own: P() if w.shape == own.shape else P(AXIS), *pairs
    )
    step = jax.shard_map(
        run.step, mesh=mesh, in_specs=(specs, specs[0]), out_specs=specs
    )
    return train(whole, jax.jit(step))


def replicated(kind):
    return sharded(kind, parts=1)


def distributed(kind):
    """`keras.distribution`, under which rows and columns of weights are shared."""
    keras.distribution.set_distribution(model_parallel(np.reshape(CPUS[:4], (2, 2))))
    try:
        run = Run(kind)
        layouts = {v.shape: v.value.sharding for v in run.weights}
        for kept in run.optimizer.variables:
            layout = layouts.get(kept.shape, kept.value.sharding)
            assert kept.value.sharding == layout, kept.path
        state, step = run.state(), jax.jit(run.step)
        for grads in run.gradients():
            state = step(state, list(map(jax.device_put, grads, layouts.values())))
        return state
    finally:
        keras.distribution.set_distribution(None)


WAYS = [distributed, *([replicated, sharded] if HAS_SHARD_MAP else [])]


def bits_of(state):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


for kind in KINDS:
    expected = bits_of(jitted(kind))
    for way in WAYS:
        found = bits_of(way(kind))
        print("WAY", json.dumps([kind, way.__name__, found == expected]))
