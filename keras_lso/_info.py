"""What `keras-lso info` prints about Keras, its backend and the optimizers."""

import contextlib
import importlib.metadata
import inspect
import platform

import keras
import numpy

from keras_lso import _version
from keras_lso._backend import KERNELS, backend
from keras_lso._core.rule_update import RuleUpdate
from keras_lso.optimizers.lamb import LAMB
from keras_lso.optimizers.larc import LARC
from keras_lso.optimizers.lars import LARS
from keras_lso.optimizers.novograd import NovoGrad

_FRAMEWORKS = "tensorflow", "tensorflow-cpu", "tf-nightly", "jax", "jaxlib", "torch"
# Classes that leave the step to another optimizer.
_WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")


def facts() -> dict[str, str]:
    """Returns versions, backend, devices and dtypes, a dict of strings."""
    # Not from the metadata: there a nightly Keras has another name, a checkout none.
    versions = {
        "keras_lso": _version.__version__,
        "keras": keras.__version__,
        "numpy": numpy.__version__,
    }
    for name in _FRAMEWORKS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "packages": ", ".join(f"{name} {v}" for name, v in versions.items()),
        "python": f"{platform.python_version()}, {platform.platform()}",
        "backend": f"{keras.backend.backend()}, kernels {KERNELS}",
        "devices": ", ".join(backend.host.devices()) or "none",
        "dtype": f"policy {keras.config.dtype_policy().name}, "
        f"floatx {keras.config.floatx()}",
    }


def steps() -> dict[str, str]:
    """Returns the kind of step of each inner optimizer, a dict of strings."""
    found: dict[str, keras.Optimizer] = {
        name: cls()
        for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)
        if issubclass(cls, keras.optimizers.Optimizer) and name not in _WRAPPERS
    }
    found["SGD, momentum"] = keras.optimizers.SGD(0.01, momentum=0.9)
    found["keras_lso.LARC"] = LARC(keras.optimizers.SGD(0.01, momentum=0.9))
    found |= {f"keras_lso.{cls.__name__}": cls() for cls in (LAMB, LARS, NovoGrad)}
    return {name: _step_of(found[name]) for name in sorted(found, key=str.lower)}


def _step_of(optimizer):
    variables = [keras.Variable([1.0, 2.0])]
    optimizer.build(variables)
    update = RuleUpdate.of(optimizer, variables)
    if update is not None and update.begin([keras.ops.ones((2,))]) is not None:
        return "one pass: unscale, skip and update"
    return backend.host.OTHER_STEP
