"""The command `keras-lso info`, also `python -m keras_lso info`."""

import argparse
import contextlib
import importlib.metadata
import inspect
import platform
import sys
import textwrap
from collections.abc import Sequence

import keras
import numpy

from keras_lso import LAMB, LARC, LARS, NovoGrad, __version__
from keras_lso._backend import KERNELS, backend
from keras_lso._core.rule_update import RuleUpdate

_FRAMEWORKS = "tensorflow", "tensorflow-cpu", "tf-nightly", "jax", "jaxlib", "torch"
# Classes that leave the step to another optimizer.
_WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with arguments, or the process's, and returns its status."""
    parser = argparse.ArgumentParser(
        prog="keras-lso", description="Prints the facts for a bug report."
    )
    help = "the versions, the backend, the devices and the step of each optimizer"
    parser.add_argument("command", choices=["info"], help=help)
    version = f"%(prog)s {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(argv)
    lines = textwrap.TextWrapper(80, subsequent_indent=" " * 11, break_on_hyphens=False)
    for name, value in _facts().items():
        print(lines.fill(f"{name:<10} {value}"))
    print("\ninner optimizer      step in LossScaleOptimizer, with float32 variables")
    for name, step in steps().items():
        print(f"{name:<20} {step}")
    return 0


def _facts() -> dict[str, str]:
    """Returns versions, backend, devices and dtypes."""
    # Not from the metadata: there a nightly Keras has another name, a checkout none.
    versions = {
        "keras_lso": __version__,
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
    """Returns the kind of step of each inner optimizer."""
    optimizers: dict[str, keras.Optimizer] = {
        name: cls()
        for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)
        if issubclass(cls, keras.optimizers.Optimizer) and name not in _WRAPPERS
    }
    optimizers["SGD, momentum"] = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizers["keras_lso.LARC"] = LARC(keras.optimizers.SGD(0.01, momentum=0.9))
    optimizers |= {f"keras_lso.{cls.__name__}": cls() for cls in (LAMB, LARS, NovoGrad)}
    kinds = {}
    for name in sorted(optimizers, key=str.lower):
        optimizer, variables = optimizers[name], [keras.Variable([1.0, 2.0])]
        optimizer.build(variables)
        update = RuleUpdate.of(optimizer, variables)
        kinds[name] = backend.host.OTHER_STEP
        if update is not None and update.begin([keras.ops.ones((2,))]) is not None:
            kinds[name] = "one pass: unscale, skip and update"
    return kinds


if __name__ == "__main__":
    sys.exit(main())
