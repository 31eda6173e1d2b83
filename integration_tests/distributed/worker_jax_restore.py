"""One of two JAX processes whose `fit` stalls and goes on, and is restarted by hand.

    python -m integration_tests.distributed.worker_jax_restore RANK PORT DISTRIBUTION

Prints the monitor's warnings, and whether both runs have the same numbers.
"""

import json
import sys

import jax
import keras
import numpy as np

rank, port, name = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)

from integration_tests.distributed.jax_meshes import CPUS, data_parallel  # noqa: E402
from integration_tests.test_restore import make_model, train_and_restart  # noqa: E402


def halves():
    """Returns a distribution in which each process has a half of the first layer."""
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], CPUS)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*first.*kernel"] = (None, "model")
    layouts[".*first.*bias"] = ("model",)
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False
    )


DISTRIBUTIONS = {
    "data": lambda: data_parallel(CPUS, auto_shard_dataset=False),
    "model": halves,
}


def held(model):
    """Returns the shards of each variable in this process."""
    optimizer = model.optimizer
    variables = [*model.weights, *optimizer._in_memory]
    return [
        np.array(shard.data)
        for variable in variables
        for shard in variable.value.addressable_shards
    ]


keras.distribution.set_distribution(DISTRIBUTIONS[name]())
model, other = make_model(normalization=False), make_model(normalization=False)
warnings, _, _ = train_and_restart(model, other)
halved = [v for v in model.weights if not v.value.is_fully_replicated]
print("HALVES", json.dumps(len(halved)))
print("WARNINGS", json.dumps(warnings))
pairs = zip(held(model), held(other), strict=True)
print("SAME", json.dumps([bool(np.array_equal(*pair)) for pair in pairs]))
finite = all(np.isfinite(value).all() for value in held(model))
print("FINITE", json.dumps(bool(finite)))
jax.distributed.shutdown()
