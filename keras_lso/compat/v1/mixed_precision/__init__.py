"""The names of `tf.compat.v1.mixed_precision`."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.compat.v1.mixed_precision import experimental
from keras_lso.compat.v1.mixed_precision.loss_scale_optimizer import (
    MixedPrecisionLossScaleOptimizer,
)
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LossScale

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "MixedPrecisionLossScaleOptimizer",
    "experimental",
]

refuse_other_names(globals())
