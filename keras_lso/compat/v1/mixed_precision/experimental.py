"""The names of `tf.compat.v1.mixed_precision.experimental`."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LossScale

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale"]

refuse_other_names(globals())
