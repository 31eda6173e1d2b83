"""Loss-scale policies: how the scale evolves from step to step."""

from keras_lso.loss_scales.dynamic import (
    DEFAULT_GROWTH_STEPS,
    DEFAULT_INITIAL_SCALE,
    DynamicLossScale,
)
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.log_max import LogMaxLossScale
from keras_lso.loss_scales.lookup import deserialize, get, serialize
from keras_lso.loss_scales.loss_scale import (
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    LossScale,
)
from keras_lso.loss_scales.searching import SearchingLossScale

__all__ = [
    "DEFAULT_GROWTH_STEPS",
    "DEFAULT_INITIAL_SCALE",
    "DEFAULT_MAX_SCALE",
    "DEFAULT_MIN_SCALE",
    "DynamicLossScale",
    "FixedLossScale",
    "LogMaxLossScale",
    "LossScale",
    "SearchingLossScale",
    "deserialize",
    "get",
    "serialize",
]
