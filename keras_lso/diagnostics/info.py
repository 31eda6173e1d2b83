"""The facts for a bug report: versions, backend, devices, step of each optimizer."""

import inspect
import platform
from collections.abc import Callable

import keras
import numpy
from rich import box
from rich.console import Console
from rich.table import Table

from keras_lso import _version
from keras_lso._backend import KERNELS, backend
from keras_lso._core.rule_update import RuleUpdate
from keras_lso.optimizers.lamb import LAMB
from keras_lso.optimizers.larc import LARC
from keras_lso.optimizers.lars import LARS
from keras_lso.optimizers.novograd import NovoGrad

# The optimizers with arguments other than their defaults, by the name to print.
_ARGUMENTS = {
    "SGD": {"learning_rate": 0.01},
    "SGD, momentum": {"learning_rate": 0.01, "momentum": 0.9},
}
# Classes that leave the step to another optimizer.
_WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")


def print_info() -> None:
    """Prints versions, backend, devices, and the kind of each optimizer's step."""
    console = Console(soft_wrap=True)
    for name, value in facts().items():
        console.print(f"{name:<10} {value}", highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("inner optimizer")
    table.add_column("step in LossScaleOptimizer, with float32 variables")
    for name, step in steps().items():
        table.add_row(name, step)
    console.print(table)


def facts() -> dict[str, str]:
    """Returns versions, backend, devices and dtypes, a dict of strings."""
    # Not from the metadata: there a nightly Keras has another name, a checkout none.
    versions = {
        "keras_lso": _version.__version__,
        "keras": keras.__version__,
        "numpy": numpy.__version__,
    }
    versions |= backend.packages()
    return {
        "packages": ", ".join(f"{name} {v}" for name, v in versions.items()),
        "python": f"{platform.python_version()}, {platform.platform()}",
        "backend": f"{keras.backend.backend()}, kernels {KERNELS}",
        "devices": ", ".join(backend.devices()) or "none",
        "dtype": f"policy {keras.config.dtype_policy().name}, "
        f"floatx {keras.config.floatx()}",
    }


def steps() -> dict[str, str]:
    """Returns the kind of step of each inner optimizer, a dict of strings."""
    return {name: _step_of(make()) for name, make in _optimizers().items()}


def _optimizers():
    """Returns a dict of names to functions that create an optimizer."""
    found: dict[str, Callable] = {}
    for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass):
        is_optimizer = issubclass(cls, keras.optimizers.Optimizer)
        if is_optimizer and name not in _WRAPPERS:
            found[name] = cls
    sgd = found.pop("SGD")
    for name, arguments in _ARGUMENTS.items():
        found[name] = lambda arguments=arguments: sgd(**arguments)
    for cls in (LAMB, LARS, NovoGrad):
        found[f"keras_lso.{cls.__name__}"] = cls
    found["keras_lso.LARC"] = lambda: LARC(found["SGD, momentum"]())
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _step_of(optimizer):
    variables = [keras.Variable([1.0, 2.0])]
    optimizer.build(variables)
    gradients = [keras.ops.ones((2,))]
    update = RuleUpdate.of(optimizer, variables)
    if update is not None and update.begin(gradients) is not None:
        return "one pass: unscale, skip and update"
    return backend.OTHER_STEP
