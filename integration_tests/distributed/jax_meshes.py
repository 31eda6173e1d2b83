"""The devices of a JAX program, and Keras's distributions over them."""

import jax
import keras

DEVICES = jax.devices()
CPUS = keras.distribution.list_devices("cpu")

# Of the weights of `problem.py`: Keras finds layouts by names.
NAMES = ["kernel_1", "bias_1", "kernel_2", "bias_2"]


def data_parallel(devices, **options):
    """Returns a distribution in which each device has a batch of its own."""
    return keras.distribution.DataParallel(devices=devices, **options)


def model_parallel(devices, **options):
    """Returns a distribution over devices of an array: rows hold a whole model each."""
    mesh = keras.distribution.DeviceMesh(devices.shape, ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel_1"] = (None, "model")
    layouts[".*bias_1"] = ("model",)
    layouts[".*kernel_2"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch", **options
    )
