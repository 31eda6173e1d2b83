"""Callbacks for `fit`."""

from keras_lso.callbacks.loss_scale_monitor import LossScaleMonitor
from keras_lso.callbacks.step_record import StepRecord
from keras_lso.callbacks.swapped_weights import SwapEMAWeights, SwapScheduleFreeWeights

__all__ = [
    "LossScaleMonitor",
    "StepRecord",
    "SwapEMAWeights",
    "SwapScheduleFreeWeights",
]


def __dir__() -> list[str]:
    return __all__
