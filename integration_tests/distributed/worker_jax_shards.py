"""Layouts, overflows and rejections of shards on four devices of one JAX process.

    python -m integration_tests.distributed.worker_jax_shards

Prints lines of a word and JSON; see `test_jax_shards.py`.
"""

import itertools
import json

import jax
import keras
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import keras_lso
from integration_tests.distributed import jax_meshes, problem
from integration_tests.distributed.jax_meshes import (
    CPUS,
    DEVICES,
    NAMES,
    model_parallel,
)
from integration_tests.distributed.jax_training import AXIS, HAS_SHARD_MAP

OPTIMIZERS = {
    **problem.OPTIMIZERS,
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "LAMB": lambda: keras_lso.LAMB(0.01, weight_decay_rate=0.01),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.01),
}


def build(make, dtype="float32", **arguments):
    variables = [
        keras.Variable(value, name=name, dtype=dtype)
        for value, name in zip(problem.initial_weights(), NAMES, strict=True)
    ]
    optimizer = keras_lso.LossScaleOptimizer(make(), **arguments)
    optimizer.build(variables)
    return optimizer, variables


keras.distribution.set_distribution(model_parallel(np.reshape(CPUS[:4], (2, 2))))
for name in OPTIMIZERS:
    # With masters, which are float32.
    optimizer, variables = build(OPTIMIZERS[name], "float16")
    specs = {v.shape: str(v.value.sharding.spec) for v in variables}
    others = [v for v in optimizer.variables if v.shape in specs]
    wrong = [v.path for v in others if str(v.value.sharding.spec) != specs[v.shape]]
    print("LAYOUTS", json.dumps([name, len(others), wrong]))


def eagerly(optimizer, variables):
    return lambda grads: optimizer.apply(grads, variables, scaled=True)


def jitted(optimizer, variables):
    state = [*variables, *optimizer.variables]

    @jax.jit
    def step(values, grads):
        trainable, own = values[: len(variables)], values[len(variables) :]
        return optimizer.stateless_apply(own, grads, trainable, scaled=True)

    def apply(grads):
        values = jax.tree.leaves(step([v.value for v in state], grads))
        for v, value in zip(state, values, strict=True):
            v.assign(value)

    return apply


def copies_of(variables):
    """Returns the bytes of all variables, whose copies on all devices are alike."""
    groups = [DEVICES[:2], DEVICES[2:4]]
    per_row = [
        [jax_meshes.whole(v.value, row).tobytes() for v in variables] for row in groups
    ]
    assert per_row[0] == per_row[1]
    return per_row[0]


def skips(apply, optimizer, variables, at, value):
    """Whether a step with one such element is skipped, and leaves all as it was."""
    arrays = [np.full(v.shape, 8.0, v.dtype) for v in variables]
    index, position = at
    arrays[index][position] = value
    grads = [
        jax.device_put(a, v.value.sharding)
        for a, v in zip(arrays, variables, strict=True)
    ]
    trained = [*variables, *optimizer.inner_optimizer.variables]
    before = copies_of(trained)
    skipped = int(optimizer.skipped_steps)
    apply(grads)
    copies_of(optimizer.variables)
    is_same = copies_of(trained) == before
    was_skipped = int(optimizer.skipped_steps) == skipped + 1
    assert is_same == was_skipped
    return was_skipped


# The first and the last column are on different devices of each row.
PLACES = [(0, (0, 0)), (0, (2, 3)), (1, 3), (2, (3, 1)), (3, 1)]
# LARC has LARS's norms, and RMSprop takes none, as momentum; to compile takes long.
CASES = [
    ("momentum", "float32", eagerly),
    ("LARS", "float32", eagerly),
    ("LAMB", "float32", jitted),
    ("NovoGrad", "float32", eagerly),
    ("global_clipnorm", "float32", jitted),
    ("momentum", "float16", jitted),
]
POLICIES = {
    "dynamic": keras_lso.loss_scales.DynamicLossScale,
    "LogMax": keras_lso.loss_scales.LogMaxLossScale,
}
RUNS = [(*case, "dynamic") for case in CASES] + [(*CASES[0], "LogMax")]
for name, dtype, how, policy in RUNS:
    optimizer, variables = build(OPTIMIZERS[name], dtype, loss_scale=POLICIES[policy]())
    apply = how(optimizer, variables)
    found = [
        skips(apply, optimizer, variables, at, value)
        for at, value in itertools.product(PLACES, [np.inf, np.nan])
    ]
    # Its square is more than float32 holds; that of the unscaled one is not.
    large = 3e4 if dtype == "float16" else 1e20
    was_skipped = skips(apply, optimizer, variables, PLACES[1], large)
    are_finite = all(np.isfinite(v.numpy()).all() for v in variables)
    found.append(are_finite and not was_skipped)
    print("SKIPS", json.dumps([name, dtype, policy, found]))


keras.distribution.set_distribution(None)


def message(spec, grad_spec, axis_name=None, make=OPTIMIZERS["momentum"], jit=False):
    """Returns the error of a step in a map over four devices, or "none"."""
    shape = (1,) if spec else (4,)
    weight = keras.Variable(np.ones(shape, "float32"), name="kernel")
    optimizer = keras_lso.LossScaleOptimizer(make())
    optimizer.build([weight])
    state = [v.value for v in optimizer.variables]

    def step(value, grad):
        return optimizer.stateless_apply(state, [grad], [value], axis_name=axis_name)[0]

    if not jit:
        step = jax.shard_map(
            step,
            mesh=Mesh(DEVICES[:4], AXIS),
            in_specs=(P(*spec), P(*grad_spec)),
            out_specs=[P(*spec)],
        )
    size = 16 if grad_spec and not spec else 4
    try:
        jax.jit(step)(np.ones(4, "float32"), np.ones(size, "float32"))
    except ValueError as error:
        return str(error)
    return "none"


def clipping():
    return keras.optimizers.SGD(0.1, global_clipnorm=1.0)


CASES = {
    "shards": {"spec": [AXIS], "grad_spec": [AXIS]},
    "whole": {"spec": [], "grad_spec": []},
    "averaged": {"spec": [], "grad_spec": [AXIS], "axis_name": AXIS},
    "not averaged": {"spec": [], "grad_spec": [AXIS]},
    "averaged already": {"spec": [], "grad_spec": [], "axis_name": AXIS},
    "no such axis": {"spec": [], "grad_spec": [AXIS], "axis_name": "model"},
    "no axis at all": {"spec": [], "grad_spec": [], "axis_name": AXIS, "jit": True},
    "clips shards": {"spec": [AXIS], "grad_spec": [AXIS], "make": clipping},
    "LARC clips shards": {
        "spec": [AXIS],
        "grad_spec": [AXIS],
        "make": lambda: keras_lso.LARC(clipping()),
    },
}
for name, case in CASES.items():
    if HAS_SHARD_MAP or "jit" in case:
        print("REFUSED", json.dumps([name, message(**case)]))
