"""The frameworks, which are imported here, and in `compat/backend/` for older APIs.

`backend` is the `Framework` that Keras runs on: `framework.py` documents what it does,
and has the defaults that fast paths are tested against. The environment variable
`KERAS_LSO_KERNELS=generic` turns these off; see `kernel_choice.py`.
"""

import importlib

import keras

from keras_lso._backend.framework import Framework
from keras_lso._backend.kernel_choice import KERNELS

_CLASSES = {
    "tensorflow": ("tensorflow.framework", "TensorFlow"),
    "jax": ("jax.framework", "JAX"),
    "torch": ("torch.framework", "Torch"),
}


def _framework_class():
    # NumPy and OpenVINO cannot train, but a model that was trained elsewhere with our
    # optimizer must load there.
    if keras.backend.backend() not in _CLASSES:
        return Framework
    module, name = _CLASSES[keras.backend.backend()]
    return getattr(importlib.import_module(f"keras_lso._backend.{module}"), name)


def without_kernels(cls):
    """Returns a subclass of a `Framework` that steps by the reference."""
    replaced = (
        *("UPDATES_IN_PLACE", "FUSES_STEPS", "scalars"),
        *("measure", "fused_step", "fused_step_takes"),
    )
    reference = {name: getattr(Framework, name) for name in replaced}
    return type(f"{cls.__name__}WithoutKernels", (cls,), reference)


_cls = _framework_class()
backend: Framework = (without_kernels(_cls) if KERNELS == "generic" else _cls)()
