"""The names of `tf.keras.mixed_precision` that concern loss scaling."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.compat.tf_keras_files import load_optimizer_state
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.mixed_precision import experimental

__all__ = ["LossScaleOptimizer", "experimental", "load_optimizer_state"]

refuse_other_names(globals())
