"""The names of `tf.keras.mixed_precision` that concern loss scaling."""

from functools import partial
from typing import TYPE_CHECKING

from keras_lso.compat.moved import refuse_name
from keras_lso.compat.tf_keras_files import load_optimizer_state
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.mixed_precision import experimental

__all__ = ["LossScaleOptimizer", "experimental", "load_optimizer_state"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # A type checker would accept any name.
    __getattr__ = partial(refuse_name, __name__)
