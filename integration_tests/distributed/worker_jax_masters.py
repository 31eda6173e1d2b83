"""Trains weights of 16 bits on four devices of one JAX process, in every way to do so.

    python -m integration_tests.distributed.worker_jax_masters

Prints lines of a word and JSON; see `test_jax_masters.py`.
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
from testing import tiers

K = keras.optimizers
KINDS = ("float32", "remainder", "stochastic")
# Names by which `model_parallel` shards, and shapes of which four devices share rows.
SHAPES = dict(zip(NAMES, [(8, 6), (8,), (4, 3), (12,)], strict=True))
SHARDED_ROWS = [True, True, False, False]
OPTIMIZERS = {
    "Adam": K.Adam,
    "LARS": keras_lso.LARS,
    "Adadelta": K.Adadelta,
    "NovoGrad": keras_lso.NovoGrad,
}


class Run:
    """Steps without state on weights that every run has the same gradients of.

    Args:
        name: String, which optimizer.
        kind: String, of masters.
        dtype: String.
        parts: Int, among how many devices the first weights are shared, each of which
            sees its rows. Defaults to 1.
    """

    def __init__(self, name, kind, dtype, parts=1):
        random = np.random.default_rng(0)
        self.weights, self.start = [], []
        for path, shape, has_parts in zip(
            SHAPES, SHAPES.values(), SHARDED_ROWS, strict=True
        ):
            value = (random.normal(size=shape) * 0.5).astype("float32")
            self.start.append(jnp.asarray(value).astype(dtype))
            # Keras checks the shapes of what stands for a variable.
            own = value[: shape[0] // parts] if has_parts else value
            self.weights.append(keras.Variable(own, dtype=dtype, name=path))
        self.optimizer = keras_lso.LossScaleOptimizer(
            OPTIMIZERS[name](0.01), initial_scale=4.0, master_weights=kind
        )
        self.optimizer.build(self.weights)
        self.dtype = dtype

    def step(self, state, grads):
        weights, own = state
        return self.optimizer.stateless_apply(own, grads, weights, scaled=True)

    def gradients(self, count=6):
        """Lists of gradients; the fourth overflows in a row of the third device."""
        random = np.random.default_rng(1)
        for i in range(count):
            grads = [random.normal(size=s).astype("float32") for s in SHAPES.values()]
            if i == 3:
                grads[0][5, 0] = np.inf
            yield [jnp.asarray(g).astype(self.dtype) for g in grads]

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

    def specs(self):
        """The layouts of `state()` where the first weights are shared by rows."""
        weights = [P(AXIS) if of_rows else P() for of_rows in SHARDED_ROWS]
        whole = [
            w.shape
            for w, of_rows in zip(self.start, SHARDED_ROWS, strict=True)
            if of_rows
        ]
        own = [P(AXIS) if v.shape in whole else P() for v in self.state()[1]]
        return weights, own


def train(run, step):
    """Returns the bits of all that is trained and kept after the steps."""
    state = jax.tree.map(jnp.copy, run.state())
    for grads in run.gradients():
        state = step(state, grads)
    return state


# --- Ways to step -------------------------------------------------------------------


def jitted(name, kind, dtype):
    run = Run(name, kind, dtype)
    return train(run, jax.jit(run.step))


def donated(name, kind, dtype):
    run = Run(name, kind, dtype)
    return train(run, jax.jit(run.step, donate_argnums=0))


def scanned(name, kind, dtype):
    run = Run(name, kind, dtype)
    grads = jax.tree.map(lambda *g: jnp.stack(g), *run.gradients())

    @jax.jit
    def steps(state, grads):
        step = lambda state, grads: (run.step(state, grads), None)  # noqa: E731
        return jax.lax.scan(step, state, grads)[0]

    weights, own = run.state()
    return steps((weights, type(run.optimizer.variables)(own)), grads)


def replicated(name, kind, dtype):
    run = Run(name, kind, dtype)
    step = jax.shard_map(
        run.step, mesh=Mesh(DEVICES[:4], AXIS), in_specs=(P(), P()), out_specs=P()
    )
    return train(run, jax.jit(step))


def sharded(name, kind, dtype):
    run = Run(name, kind, dtype, parts=4)
    specs = run.specs()
    step = jax.shard_map(
        run.step,
        mesh=Mesh(DEVICES[:4], AXIS),
        in_specs=(specs, specs[0]),
        out_specs=specs,
    )
    return train(run, jax.jit(step))


def mapped(name, kind, dtype):
    """`jax.vmap` over two models, which draw the same bits."""
    run = Run(name, kind, dtype)
    step = jax.jit(jax.vmap(run.step, in_axes=(0, None)))
    state = jax.tree.map(lambda x: jnp.stack([x, x]), run.state())
    for grads in run.gradients():
        state = step(state, grads)
    return jax.tree.map(lambda x: x[1], state)


def pmapped(name, kind, dtype):
    """`jax.pmap` over two devices with the same batch."""
    run = Run(name, kind, dtype)
    step = jax.pmap(run.step, axis_name=AXIS, devices=DEVICES[:2])
    twice = lambda tree: jax.tree.map(lambda x: np.stack([x, x]), tree)  # noqa: E731
    state = twice(run.state())
    for grads in run.gradients():
        state = jax.device_get(step(state, twice(grads)))
    assert all(x[0].tobytes() == x[1].tobytes() for x in jax.tree.leaves(state))
    return jax.tree.map(lambda x: x[0], state)


def distributed(name, kind, dtype):
    """`keras.distribution`, under which rows and columns of weights are shared."""
    keras.distribution.set_distribution(model_parallel(np.reshape(CPUS[:4], (2, 2))))
    try:
        run = Run(name, kind, dtype)
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


WAYS = [donated, scanned, mapped, pmapped, distributed]
if HAS_SHARD_MAP:
    WAYS += [replicated, sharded]
NAMES_OF_CASES = OPTIMIZERS if tiers.is_full() else ["Adam"]
if not tiers.is_full():
    # To compile takes long; a step of `fit` is donated.
    WAYS = [w for w in WAYS if w in (distributed, replicated, sharded)]


def bits_of(state):
    return [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(state)]


for name in NAMES_OF_CASES:
    for dtype in ("bfloat16", "float16") if tiers.is_full() else ("bfloat16",):
        numbers = {}
        for kind in KINDS:
            expected = jitted(name, kind, dtype)
            run = Run(name, kind, dtype)
            for v, value in zip(run.weights, expected[0], strict=True):
                v.assign(value)
            for v, value in zip(run.optimizer.variables, expected[1], strict=True):
                v.assign(value)
            store: dict = {}
            run.optimizer.save_own_variables(store)
            numbers[kind] = [
                store[str(i)].tolist() for i in range(len(store) - 4, len(store))
            ]
            skipped = int(run.optimizer.skipped_steps)
            for way in WAYS if kind != "float32" else ():
                same = [
                    a == b
                    for a, b in zip(
                        bits_of(way(name, kind, dtype)), bits_of(expected), strict=True
                    )
                ]
                line = [name, dtype, kind, way.__name__, same, skipped]
                print("WAY", json.dumps(line))
        print("NUMBERS", json.dumps([name, dtype, numbers]))
