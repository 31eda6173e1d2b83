"""Trains bfloat16 weights on four devices of one JAX process, in every way to do so.

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

KINDS = ("remainder", "stochastic")
# Names by which `model_parallel` shards, and shapes of which four devices share rows.
SHAPES = dict(zip(NAMES, [(8, 6), (8,), (4, 3), (12,)], strict=True))


class Run:
    """Steps without state on weights that every run has the same gradients of."""

    def __init__(self, kind):
        random = np.random.default_rng(0)
        self.weights, self.start = [], []
        for path, shape in SHAPES.items():
            value = (random.normal(size=shape) * 0.5).astype("float32")
            self.start.append(jnp.asarray(value).astype("bfloat16"))
            self.weights.append(keras.Variable(value, dtype="bfloat16", name=path))
        self.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=4.0, master_weights=kind
        )
        self.optimizer.build(self.weights)

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
            yield [jnp.asarray(g).astype("bfloat16") for g in grads]

    def state(self):
        """What a step begins with: the whole weights, and what is kept of them."""
        own = []
        for variable in self.optimizer.variables:
            whole = self._whole(variable)
            own.append(variable.value if whole is None else whole)
        return self.start, own

    def _whole(self, variable):
        for weight, start in zip(self.weights, self.start, strict=True):
            if weight.path == variable.path and variable.shape == weight.shape:
                dtype = variable.dtype
                is_number = dtype == "float32"
                return (
                    start.astype(dtype) if is_number else jnp.zeros(start.shape, dtype)
                )
            name = weight.path.replace("/", "_")
            if variable.shape == weight.shape and f"/{name}_" in variable.path:
                return jnp.zeros(start.shape, variable.dtype)
        return None


def train(run, step):
    """Returns the bits of all that is trained and kept after the steps."""
    state = jax.tree.map(jnp.copy, run.state())
    for grads in run.gradients():
        state = step(state, grads)
    return state


def jitted(kind):
    run = Run(kind)
    return train(run, jax.jit(run.step))


def replicated(kind):
    run = Run(kind)
    step = jax.shard_map(
        run.step, mesh=Mesh(DEVICES[:4], AXIS), in_specs=(P(), P()), out_specs=P()
    )
    return train(run, jax.jit(step))


def distributed(kind):
    """`keras.distribution`, under which rows and columns of weights are shared."""
    keras.distribution.set_distribution(model_parallel(np.reshape(CPUS[:4], (2, 2))))
    try:
        run = Run(kind)
        kept_with = run.optimizer._masters.variables
        pairs = zip(run.weights[: len(kept_with)], kept_with, strict=True)
        for weight, kept in pairs:
            assert weight.value.sharding == kept.value.sharding, weight.path
        run.start = [w.value for w in run.weights]
        state = run.start, [v.value for v in run.optimizer.variables]
        step = jax.jit(run.step)
        for grads in run.gradients():
            layouts = [w.value.sharding for w in run.weights]
            state = step(state, list(map(jax.device_put, grads, layouts)))
        return state
    finally:
        keras.distribution.set_distribution(None)


WAYS = [distributed, *([replicated] if HAS_SHARD_MAP else [])]


def bits_of(state):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


for kind in KINDS:
    expected = bits_of(jitted(kind))
    for way in WAYS:
        found = bits_of(way(kind))
        print("WAY", json.dumps([kind, way.__name__, found == expected]))
