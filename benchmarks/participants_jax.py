"""Two devices of one process, which share the work by `jax.jit` over a mesh.

Under "data" all weights are on both, and a step takes the mean of both's gradients.
Under "model" each has half of every tensor that can be halved, and of its gradient.
"""

import os
from functools import partial

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.data import check_healthy, make_data
from benchmarks.inner import INNER, SCALE
from benchmarks.participants import (
    PARTICIPANTS,
    make_group,
    optimizers,
)
from benchmarks.rows_jax import jitted_step, seconds
from benchmarks.timing import time_in_turn

ENGINES = {"data": "devices, data parallel", "model": "devices, model parallel"}


def measure(shapes, inner, rounds):
    """See `participants.measure`."""
    mesh = Mesh(jax.devices()[:PARTICIPANTS], ("x",))
    data = make_data(shapes, "float32")
    groups = []
    for kind, engine in ENGINES.items():
        for name in inner:
            roles, clocks = {}, {}
            for row, (role, optimizer) in optimizers(INNER[name].make).items():
                gradients = _gradients(mesh, kind, data, is_scaled=role != "inner")
                step = _step(mesh, kind, optimizer, data, gradients)
                jax.block_until_ready(step.run())
                check_healthy(f"{engine}, {name}, {row}", step, data)
                roles[row], clocks[row] = role, partial(seconds, step)
            times = time_in_turn(clocks, rounds)
            groups.append(make_group(engine, name, shapes, roles, times))
            jax.clear_caches()
    return groups


def _gradients(mesh, kind, data, is_scaled):
    # By NumPy: JAX would compile each operation anew for each shape.
    factor = np.float32(SCALE if is_scaled else 1)
    if kind == "model":
        return [_put(mesh, kind, g * factor) for g in data.gradients]
    by_device = NamedSharding(mesh, PartitionSpec("x"))
    return [
        jax.device_put(np.stack([g * factor] * PARTICIPANTS), by_device)
        for g in data.gradients
    ]


def _step(mesh, kind, optimizer, data, gradients):
    variables = [keras.Variable(w) for w in data.weights]
    optimizer.build(variables)

    def step(state, gradients):
        if kind == "data":
            gradients = [g.mean(axis=0) for g in gradients]
        trainable, own = state
        return optimizer.stateless_apply(own, gradients, trainable)

    state = [
        [_put(mesh, kind, np.array(v.value)) for v in some]
        for some in (variables, optimizer.variables)
    ]
    return jitted_step(step, tuple(state), gradients)


def _put(mesh, kind, value):
    """Returns a value on both devices: whole, or half of its largest axis on each."""
    spec = [None] * value.ndim
    if kind == "model" and value.ndim:
        axis = max(range(value.ndim), key=lambda i: value.shape[i])
        if value.shape[axis] % PARTICIPANTS == 0:
            spec[axis] = "x"
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))
