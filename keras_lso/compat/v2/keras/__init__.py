"""The names of `tf.compat.v2.keras` that concern loss scaling."""

from keras_lso.compat.v2.keras import mixed_precision

__all__ = ["mixed_precision"]


def __dir__() -> list[str]:
    return __all__
