"""The name in `tf.compat.v1.keras.mixed_precision.experimental`."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.mixed_precision.experimental import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]

refuse_other_names(globals())
