"""The names of `tf.compat.v1.keras.mixed_precision` that concern loss scaling."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.compat.v1.keras.mixed_precision import experimental
from keras_lso.mixed_precision import LossScaleOptimizer, load_optimizer_state

__all__ = ["LossScaleOptimizer", "experimental", "load_optimizer_state"]

refuse_other_names(globals())
