"""The backends: the modules that import the frameworks.

(`compat/backend/` imports them too, for older APIs.)

`backend` is the `Framework` of the framework that Keras runs on. `framework.py`
documents its methods, and has the defaults that fast paths are tested against. The
environment variable `KERAS_LSO_KERNELS=generic` turns the fast paths off; see
`kernel_choice.py`.
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
    # NumPy and OpenVINO cannot train. But a model that was trained elsewhere with this
    # package's optimizer must load there.
    if keras.backend.backend() not in _CLASSES:
        return Framework
    module, name = _CLASSES[keras.backend.backend()]
    return getattr(importlib.import_module(f"keras_lso._backend.{module}"), name)


def without_kernels(cls):
    """Returns a subclass of a `Framework` whose steps are those of the reference."""
    replaced = (
        *("UPDATES_IN_PLACE", "FUSES_STEPS", "scalars"),
        *("measure", "update", "takes_update"),
    )
    reference = {name: getattr(Framework, name) for name in replaced}
    return type(f"{cls.__name__}WithoutKernels", (cls,), reference)


_cls = _framework_class()
backend: Framework = (without_kernels(_cls) if KERNELS == "generic" else _cls)()
