"""The names of `tf.compat.v1` that concern loss scaling."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.compat.v1 import keras, mixed_precision

__all__ = ["keras", "mixed_precision"]

refuse_other_names(globals())
