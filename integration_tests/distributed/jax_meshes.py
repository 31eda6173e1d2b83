"""The devices of a JAX program, Keras's distributions over them, and their arrays."""

import jax
import keras
import numpy as np

DEVICES = jax.devices()
CPUS = keras.distribution.list_devices("cpu")

# The names of the weights of `problem.py`, by which Keras finds layouts.
NAMES = ["kernel_1", "bias_1", "kernel_2", "bias_2"]


def data_parallel(devices, **options):
    """Returns a distribution in which each device has its own batch."""
    return keras.distribution.DataParallel(devices=devices, **options)


def model_parallel(devices, **options):
    """Returns a distribution over an array of devices; each row holds a model."""
    mesh = keras.distribution.DeviceMesh(devices.shape, ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel_1"] = (None, "model")
    layouts[".*bias_1"] = ("model",)
    layouts[".*kernel_2"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch", **options
    )


def whole(array, devices):
    """Puts an array together from the shards on some devices."""
    shards = [s for s in array.addressable_shards if s.device in devices]
    assert {s.device for s in shards} == set(devices)
    found = np.zeros(array.shape, array.dtype)
    seen = np.zeros(array.shape, bool)
    for shard in shards:
        data = np.asarray(shard.data)
        if seen[shard.index].any():
            assert found[shard.index].tobytes() == data.tobytes(), shard.device
        found[shard.index] = data
        seen[shard.index] = True
    assert seen.all()
    return found


def save(path, states, devices):
    """Writes the arrays on some devices as `problem.save` does."""
    np.savez(path, *[whole(column, devices) for column in jax.tree.leaves(states)])
