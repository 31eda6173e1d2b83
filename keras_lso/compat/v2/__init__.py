"""The names of `tf.compat.v2` that concern loss scaling."""

from keras_lso.compat.moved import refuse_other_names
from keras_lso.compat.v2 import keras

__all__ = ["keras"]

refuse_other_names(globals())
