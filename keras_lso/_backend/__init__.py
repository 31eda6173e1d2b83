"""The backends: the modules that import the frameworks.

`backend` is the `Framework` of the framework that Keras runs on.
"""

import importlib
import warnings

import keras

from keras_lso._backend.framework import KERNELS, KERNELS_OF_BACKENDS, Framework

_CLASSES = {
    "tensorflow": ("tensorflow.framework", "TensorFlow"),
    "jax": ("jax.framework", "JAX"),
    "torch": ("torch.framework", "Torch"),
}


# A model that was trained elsewhere with this package's optimizer must load there.
_WITHOUT_TRAINING = ("numpy", "openvino")


def framework_class(name: str) -> type[Framework]:
    """Returns the class of a backend of Keras; warns of one that is not known here."""
    if name in _CLASSES:
        module, cls = _CLASSES[name]
        return getattr(importlib.import_module(f"keras_lso._backend.{module}"), cls)
    if name not in _WITHOUT_TRAINING:
        warnings.warn(
            f"keras_lso is not tested with Keras's backend {name!r}. Steps run in "
            "`keras.ops`, without fast paths: compare a float32 run with one without "
            "this package first. Tested are 'tensorflow', 'jax' and 'torch'",
            stacklevel=2,
        )
    return Framework


def without_kernels(cls: type[Framework]) -> type[Framework]:
    """Returns a subclass of a `Framework` whose steps are those of the reference."""
    reference = {name: getattr(Framework, name) for name in KERNELS_OF_BACKENDS}
    return type(f"{cls.__name__}WithoutKernels", (cls,), reference)


_cls = framework_class(keras.backend.backend())
backend: Framework = (without_kernels(_cls) if KERNELS == "generic" else _cls)()
