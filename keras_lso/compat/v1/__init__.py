"""The names of `tf.compat.v1` that concern loss scaling."""

from functools import partial
from typing import TYPE_CHECKING

from keras_lso.compat.moved import refuse_name
from keras_lso.compat.v1 import keras, mixed_precision

__all__ = ["keras", "mixed_precision"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # A type checker would accept any name.
    __getattr__ = partial(refuse_name, __name__)
