"""Callbacks for `fit`."""

from keras_lso.callbacks.loss_scale_monitor import LossScaleMonitor
from keras_lso.callbacks.step_record import StepRecord
from keras_lso.callbacks.swap_ema_weights import SwapEMAWeights
from keras_lso.callbacks.swap_schedule_free_weights import SwapScheduleFreeWeights

__all__ = [
    "LossScaleMonitor",
    "StepRecord",
    "SwapEMAWeights",
    "SwapScheduleFreeWeights",
]
