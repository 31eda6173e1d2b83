"""The command `keras-lso info`, also `python -m keras_lso info`."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import inspect
import platform
import sys
import textwrap
from collections.abc import Sequence

import numpy

from keras_lso import __version__

# Functions import Keras, and what needs it: this takes seconds, and fails where Keras's
# backend is missing.

_FRAMEWORKS = "tensorflow", "tensorflow-cpu", "tf-nightly", "jax", "jaxlib", "torch"
# Classes that leave the step to another optimizer.
_WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with arguments, or the process's, and returns its status."""
    parser = argparse.ArgumentParser(
        prog="keras-lso",
        description="Prints the facts for a bug report.",
        epilog="Exit status: 2 if an argument is wrong, 3 if Keras cannot be imported.",
    )
    help = "the versions, the backend, the devices and the step of each optimizer"
    parser.add_argument("command", choices=["info"], help=help)
    version = f"%(prog)s {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(argv)
    try:
        import keras  # noqa: F401
    except Exception as error:
        found = filter(importlib.util.find_spec, ("jax", "tensorflow", "torch"))
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        print(
            f"keras-lso: Keras cannot be imported ({cause}). Set the environment "
            "variable KERAS_BACKEND to a backend that is installed: "
            f"{', '.join(found) or 'none of jax, tensorflow and torch'}.",
            file=sys.stderr,
        )
        return 3
    # Before our other modules, which an unsupported version of Keras could break.
    importlib.import_module("keras_lso._keras_internals.keras_version")
    lines = textwrap.TextWrapper(80, subsequent_indent=" " * 11, break_on_hyphens=False)
    for name, value in _facts().items():
        print(lines.fill(f"{name:<10} {value}"))
    print("\ninner optimizer      step in LossScaleOptimizer, with float32 variables")
    for name, step in steps().items():
        print(f"{name:<20} {step}")
    return 0


def _facts():
    """Returns versions, backend, devices and dtypes, a dict of strings."""
    import keras

    from keras_lso._backend import KERNELS, backend

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
    """Returns the kind of step of each inner optimizer, a dict of strings."""
    import keras

    from keras_lso._backend import backend
    from keras_lso._core.rule_update import RuleUpdate
    from keras_lso.optimizers.lamb import LAMB
    from keras_lso.optimizers.larc import LARC
    from keras_lso.optimizers.lars import LARS
    from keras_lso.optimizers.novograd import NovoGrad

    found: dict[str, keras.Optimizer] = {
        name: cls()
        for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)
        if issubclass(cls, keras.optimizers.Optimizer) and name not in _WRAPPERS
    }
    found["SGD, momentum"] = keras.optimizers.SGD(0.01, momentum=0.9)
    found["keras_lso.LARC"] = LARC(keras.optimizers.SGD(0.01, momentum=0.9))
    found |= {f"keras_lso.{cls.__name__}": cls() for cls in (LAMB, LARS, NovoGrad)}
    kinds = {}
    for name in sorted(found, key=str.lower):
        optimizer, variables = found[name], [keras.Variable([1.0, 2.0])]
        optimizer.build(variables)
        update = RuleUpdate.of(optimizer, variables)
        kinds[name] = backend.host.OTHER_STEP
        if update is not None and update.begin([keras.ops.ones((2,))]) is not None:
            kinds[name] = "one pass: unscale, skip and update"
    return kinds


if __name__ == "__main__":
    sys.exit(main())
