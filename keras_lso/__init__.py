"""Loss scaling for Keras 3, on TensorFlow, JAX and PyTorch."""

# First, since an unsupported version of Keras could break the other imports.
from keras_lso._keras_internals import keras_version  # noqa: F401

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from keras_lso import callbacks, compat, loss_scales, plotting, schedules
from keras_lso._core.spikes import SpikeGuard
from keras_lso._version import __version__  # noqa: F401
from keras_lso.compat import registration  # noqa: F401
from keras_lso.diagnostics.float16 import float16_report
from keras_lso.diagnostics.float32_layers import keep_in_float32
from keras_lso.diagnostics.recommendation import recommend
from keras_lso.diagnostics.statistics import (
    protect_statistics,
    restore_if_skipped,
    stateless_restore_if_skipped,
)
from keras_lso.diagnostics.underflow import underflow_report
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.guarded import GuardedOptimizer
from keras_lso.optimizers.lamb import LAMB
from keras_lso.optimizers.larc import LARC
from keras_lso.optimizers.lars import LARS
from keras_lso.optimizers.novograd import NovoGrad

if TYPE_CHECKING:
    from keras_lso import mixed_precision
    from keras_lso.compat.saving import deserialize, load_model

__all__ = [
    "GuardedOptimizer",
    "LAMB",
    "LARC",
    "LARS",
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

# What serves older APIs is imported when it is used.
_LATE = ("deserialize", "load_model", "mixed_precision")


def _find(name: str) -> Any:
    if name == "mixed_precision":
        return importlib.import_module("keras_lso.mixed_precision")
    if name in _LATE:
        return getattr(importlib.import_module("keras_lso.compat.saving"), name)
    raise AttributeError(f"module 'keras_lso' has no attribute {name!r}")


if not TYPE_CHECKING:  # A type checker would accept any name.
    __getattr__ = _find


def __dir__() -> list[str]:
    return [*globals(), *_LATE]
