"""The names of `tf.compat.v2` that concern loss scaling."""

from keras_lso.compat.v2 import keras

__all__ = ["keras"]


def __dir__() -> list[str]:
    return __all__
