"""Learning-rate schedules, under their usual names: functions from steps to rates.

A wrong argument raises a `ValueError` or a `TypeError`. Rates are zero or more.
"""

from keras_lso.schedules.combined import (
    JoinedSchedules,
    LinearWarmup,
    PerUpdate,
    PolynomialWarmup,
    Scaled,
)
from keras_lso.schedules.lookup import deserialize, get, serialize
from keras_lso.schedules.recipes import linear_scaling, mlperf_bert, mlperf_resnet
from keras_lso.schedules.runs import (
    Cyclical,
    InverseSquareRoot,
    OneCycle,
    WarmupCosine,
    WarmupStableDecay,
)

__all__ = [
    "Cyclical",
    "InverseSquareRoot",
    "JoinedSchedules",
    "LinearWarmup",
    "OneCycle",
    "PerUpdate",
    "PolynomialWarmup",
    "Scaled",
    "WarmupCosine",
    "WarmupStableDecay",
    "deserialize",
    "get",
    "linear_scaling",
    "mlperf_bert",
    "mlperf_resnet",
    "serialize",
]


def __dir__() -> list[str]:
    return __all__
