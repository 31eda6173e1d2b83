"""The names of `tf.compat.v1.keras` that concern loss scaling."""

from keras_lso.compat.v1.keras import mixed_precision

__all__ = ["mixed_precision"]


def __dir__() -> list[str]:
    return __all__
