"""The names of `tf.compat.v1.keras` that concern loss scaling."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.compat.v1.keras import mixed_precision

__all__ = ["mixed_precision"]

refuse_other_names(globals())
