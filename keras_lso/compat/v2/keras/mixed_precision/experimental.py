"""The name in `tf.compat.v2.keras.mixed_precision.experimental`."""

from functools import partial
from typing import TYPE_CHECKING

from keras_lso.compat.moved import refuse_name
from keras_lso.mixed_precision.experimental import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # A type checker would accept any name.
    __getattr__ = partial(refuse_name, __name__)
