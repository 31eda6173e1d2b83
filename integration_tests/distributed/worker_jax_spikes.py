"""Two devices of which one has an outlier skip the step together, in a `shard_map`.

Prints which steps were applied: where each device has a gradient of its own, and where
each has a shard of the variables.
"""

import json

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from integration_tests.distributed import spikes

mesh = Mesh(jax.devices()[:2], ("devices",))


def run(in_spec, of_step, **arguments):
    shards = 2 if in_spec else 1
    optimizer, variables = spikes.make(
        [(s[0] // shards, *s[1:]) for s in spikes.SHAPES]
    )
    # Weights and slots are sharded; the rest is the same on all devices.
    shapes = {v.shape for v in variables}
    parts = variables, optimizer.variables
    specs = [[in_spec if v.shape in shapes else P() for v in part] for part in parts]

    def whole(variable):
        is_sharded = variable.shape in shapes
        value = np.array(variable.value)
        return np.concatenate([value] * shards) if is_sharded else value

    values = [list(map(whole, part)) for part in parts]

    def step(trainable, own, grads):
        if not arguments:
            return optimizer.stateless_apply(own, grads, trainable)
        grads = [g[0] for g in grads]
        return optimizer.stateless_apply(own, grads, trainable, **arguments)

    mapped = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P("devices")), out_specs=tuple(specs)
        )
    )
    applied, before = [], np.asarray(values[0][0])
    for i in range(24):
        values = mapped(*values, of_step(i))
        after = np.asarray(values[0][0])
        applied.append(not np.array_equal(after, before))
        before = after
    [counts] = [
        value
        for variable, value in zip(optimizer.variables, values[1], strict=True)
        if variable.name == "spike_counts"
    ]
    return [applied, int(counts[2])]


def stacked(i):
    pairs = zip(spikes.gradients(i, 0), spikes.gradients(i, 1), strict=True)
    return [np.stack(pair) for pair in pairs]


def averaged(i):
    return [g.mean(0) for g in stacked(i)]


print("AVERAGED", json.dumps(run(P(), stacked, axis_name="devices")))
print("SHARDS", json.dumps(run(P("devices"), averaged)))
