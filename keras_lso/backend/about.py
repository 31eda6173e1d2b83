"""What a bug report says of the framework."""

import importlib.metadata

import keras

_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "jax": ("jax", "jaxlib"),
    "torch": ("torch",),
}
# How `run_if` runs the step of an optimizer that has no rule.
OTHER_STEPS = {
    "tensorflow": "its own step, in a branch",
    "jax": "its own step, fused with the check",
    "torch": "its own step, after a look at the flag",
}


def packages():
    """Returns the versions of the framework's packages that are installed, by name."""
    versions = {}
    for name in _PACKAGES.get(keras.backend.backend(), ()):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def devices():
    """Returns the names of the devices that the framework sees, a list."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return [device.name for device in tf.config.list_logical_devices()]
    if backend == "jax":
        import jax

        return [f"{device.platform}:{device.id}" for device in jax.devices()]
    if backend == "torch":
        import torch

        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        return list(names) or ["cpu"]
    return []


def other_step():
    """Returns in words how the step of an optimizer is run that has no rule."""
    return OTHER_STEPS.get(keras.backend.backend(), "none: this backend trains nothing")
