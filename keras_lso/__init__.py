"""Float16, bfloat16 and large-batch training for Keras 3: TensorFlow, JAX, PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

# A build takes the version from here: a checkout may have no metadata.
__version__ = "0.3.0.dev0"

# First, since an unsupported version of Keras could break the other imports.
from keras_lso._keras_internals import keras_version  # noqa: F401

# isort: split
from keras_lso import compat, loss_scales, schedules
from keras_lso._core.spikes import SpikeGuard
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.guarded import GuardedOptimizer
from keras_lso.optimizers.lamb import LAMB
from keras_lso.optimizers.larc import LARC
from keras_lso.optimizers.lars import LARS
from keras_lso.optimizers.novograd import NovoGrad

if TYPE_CHECKING:
    from keras_lso import callbacks, mixed_precision, plotting
    from keras_lso.compat.saving import deserialize, load_model
    from keras_lso.diagnostics.float16 import float16_report
    from keras_lso.diagnostics.float32_layers import keep_in_float32
    from keras_lso.diagnostics.recommendation import recommend
    from keras_lso.diagnostics.underflow import underflow_report
    from keras_lso.statistics import (
        protect_statistics,
        restore_if_skipped,
        stateless_restore_if_skipped,
    )

__all__ = [
    "LAMB",
    "LARC",
    "LARS",
    "GuardedOptimizer",
    "LossScaleOptimizer",
    "NovoGrad",
    "SpikeGuard",
    "callbacks",
    "compat",
    "deserialize",
    "float16_report",
    "keep_in_float32",
    "load_model",
    "loss_scales",
    "mixed_precision",
    "plotting",
    "protect_statistics",
    "recommend",
    "restore_if_skipped",
    "schedules",
    "stateless_restore_if_skipped",
    "underflow_report",
]


def __dir__() -> list[str]:
    return __all__


# Imported when they are used, since no saved config names them, by their modules.
_LATE = dict.fromkeys(("callbacks", "mixed_precision", "plotting"), "")
_LATE |= dict.fromkeys(("deserialize", "load_model"), "compat.saving")
_LATE |= {
    "float16_report": "diagnostics.float16",
    "keep_in_float32": "diagnostics.float32_layers",
    "protect_statistics": "statistics",
    "recommend": "diagnostics.recommendation",
    "restore_if_skipped": "statistics",
    "stateless_restore_if_skipped": "statistics",
    "underflow_report": "diagnostics.underflow",
}


def _find(name: str) -> Any:
    """Imports the module of a name, and returns what the name stands for."""
    if name not in _LATE:
        is_callback = not name.startswith("_") and name in _find("callbacks").__all__
        hint = f". Write `keras_lso.callbacks.{name}`" if is_callback else ""
        raise AttributeError(f"module 'keras_lso' has no attribute {name!r}{hint}")
    module = importlib.import_module(f"keras_lso.{_LATE[name] or name}")
    return getattr(module, name) if _LATE[name] else module


if not TYPE_CHECKING:  # A type checker would accept any name.
    __getattr__ = _find
