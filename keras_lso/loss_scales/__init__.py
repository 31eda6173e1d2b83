"""Loss-scale policies: how the scale evolves from step to step."""

from keras_lso.loss_scales.dynamic import DynamicLossScale
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.log_max import LogMaxLossScale
from keras_lso.loss_scales.lookup import deserialize, get, serialize
from keras_lso.loss_scales.loss_scale import LossScale

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LogMaxLossScale",
    "LossScale",
    "deserialize",
    "get",
    "serialize",
]


def __dir__() -> list[str]:
    return __all__
