"""Trains a model with moving statistics on four devices, protected or not.

Prints what each device holds after each batch: of data parallelism whole statistics, of
model parallelism the halves of those that are sharded.
"""

import json

import keras
import numpy as np

import keras_lso
from integration_tests.distributed import statistics_fit
from integration_tests.distributed.jax_meshes import CPUS, data_parallel


def model_parallel():
    devices = np.array(CPUS).reshape(2, 2)
    mesh = keras.distribution.DeviceMesh(devices.shape, ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    for name in ("gamma", "beta", "moving_mean", "moving_variance"):
        layouts[f".*{name}"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def local_values(variable):
    return [np.asarray(shard.data) for shard in variable.value.addressable_shards]


for name, distribution in {
    "DATA": data_parallel(CPUS),
    "MODEL": model_parallel(),
}.items():
    keras.distribution.set_distribution(distribution)
    protected = keras_lso.protect_statistics(statistics_fit.make_model())
    for model in (protected, statistics_fit.make_model()):
        print(name, json.dumps(statistics_fit.record(model, local_values)))
