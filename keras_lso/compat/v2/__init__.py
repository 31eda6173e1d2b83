"""The names of `tf.compat.v2` that have to do with loss scaling."""

from keras_lso.compat.v2 import keras

__all__ = ["keras"]
