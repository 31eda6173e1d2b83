"""The names of `tf.compat.v1.mixed_precision`."""

from functools import partial
from typing import TYPE_CHECKING

from keras_lso.compat.moved import refuse_name
from keras_lso.compat.v1.mixed_precision import experimental
from keras_lso.compat.v1.mixed_precision.loss_scale_optimizer import (
    MixedPrecisionLossScaleOptimizer,
)
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LossScale

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "MixedPrecisionLossScaleOptimizer",
    "experimental",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # A type checker would accept any name.
    __getattr__ = partial(refuse_name, __name__)
