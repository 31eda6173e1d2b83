"""The names of `tf.compat.v1.mixed_precision.experimental`."""

from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LossScale

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale"]


def __dir__() -> list[str]:
    return __all__
