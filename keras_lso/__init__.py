"""Loss scaling for Keras 3, on TensorFlow, JAX and PyTorch."""

# Before anything that a version of Keras which is not supported could break.
from keras_lso import _keras_version  # noqa: F401

# isort: split
from keras_lso import (
    callbacks,
    compat,
    loss_scales,
    mixed_precision,
    plotting,
    schedules,
)
from keras_lso._version import __version__  # noqa: F401
from keras_lso.float16 import float16_report
from keras_lso.float32_layers import keep_in_float32
from keras_lso.lamb import LAMB
from keras_lso.larc import LARC
from keras_lso.lars import LARS
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.novograd import NovoGrad
from keras_lso.saving import deserialize, load_model
from keras_lso.statistics import (
    protect_statistics,
    restore_if_skipped,
    stateless_restore_if_skipped,
)
from keras_lso.underflow import underflow_report

__all__ = [
    "LAMB",
    "LARC",
    "LARS",
    "LossScaleOptimizer",
    "NovoGrad",
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
    "restore_if_skipped",
    "schedules",
    "stateless_restore_if_skipped",
    "underflow_report",
]
