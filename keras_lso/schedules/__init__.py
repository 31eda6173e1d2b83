"""Learning-rate schedules, under their usual names.

Every class here is a `keras.optimizers.schedules.LearningRateSchedule`: pass it to
an optimizer as the `learning_rate`. The first step is step 0. The schedules of the
TensorFlow Model Garden compute the same rates as its
`official.modeling.optimization.lr_schedule`, and load its configs. OpenSeq2Seq's
learning-rate policies are classes here too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_lso.schedules.constant import FixedLR
from keras_lso.schedules.cyclical import Cyclical
from keras_lso.schedules.inverse_square_root import InverseSquareRoot
from keras_lso.schedules.joined import JoinedSchedules
from keras_lso.schedules.lookup import deserialize, get, serialize
from keras_lso.schedules.one_cycle import OneCycle
from keras_lso.schedules.per_update import PerUpdate
from keras_lso.schedules.polynomial import PolynomialDecayWithOffset
from keras_lso.schedules.recipes import (
    LAMBRecipe,
    Recipe,
    linear_scaling,
    mlperf_bert,
    mlperf_resnet,
)
from keras_lso.schedules.scaled import Scaled
from keras_lso.schedules.warmup import LinearWarmup, PolynomialWarmup
from keras_lso.schedules.warmup_cosine import WarmupCosine
from keras_lso.schedules.warmup_stable_decay import WarmupStableDecay

if TYPE_CHECKING:
    from keras_lso.compat.model_garden.schedules import (
        CosineDecayWithOffset,
        DirectPowerDecay,
        ExponentialDecayWithOffset,
        PiecewiseConstantDecayWithOffset,
        PolynomialWarmUp,
        PowerAndLinearDecay,
        PowerDecayWithOffset,
        StepCosineDecayWithOffset,
    )
    from keras_lso.compat.open_seq2seq.schedules import (
        CosineDecayPolicy,
        ExpDecay,
        InvPolyDecay,
        PiecewiseConstant,
        PolyDecay,
        TransformerPolicy,
    )

__all__ = [
    "CosineDecayPolicy",
    "CosineDecayWithOffset",
    "Cyclical",
    "DirectPowerDecay",
    "ExpDecay",
    "ExponentialDecayWithOffset",
    "FixedLR",
    "InvPolyDecay",
    "InverseSquareRoot",
    "JoinedSchedules",
    "LAMBRecipe",
    "LinearWarmup",
    "OneCycle",
    "PerUpdate",
    "PiecewiseConstant",
    "PiecewiseConstantDecayWithOffset",
    "PolyDecay",
    "PolynomialDecayWithOffset",
    "PolynomialWarmUp",
    "PolynomialWarmup",
    "PowerAndLinearDecay",
    "PowerDecayWithOffset",
    "Recipe",
    "Scaled",
    "StepCosineDecayWithOffset",
    "TransformerPolicy",
    "WarmupCosine",
    "WarmupStableDecay",
    "deserialize",
    "get",
    "linear_scaling",
    "mlperf_bert",
    "mlperf_resnet",
    "serialize",
]

# Classes that only users of other libraries need are imported when they are used.
_MODEL_GARDEN = (
    "CosineDecayWithOffset",
    "DirectPowerDecay",
    "ExponentialDecayWithOffset",
    "PiecewiseConstantDecayWithOffset",
    "PolynomialWarmUp",
    "PowerAndLinearDecay",
    "PowerDecayWithOffset",
    "StepCosineDecayWithOffset",
)
_OPEN_SEQ2SEQ = (
    "CosineDecayPolicy",
    "ExpDecay",
    "InvPolyDecay",
    "PiecewiseConstant",
    "PolyDecay",
    "TransformerPolicy",
)


def _find(name: str) -> Any:
    if name in _MODEL_GARDEN:
        module = importlib.import_module("keras_lso.compat.model_garden.schedules")
    elif name in _OPEN_SEQ2SEQ:
        module = importlib.import_module("keras_lso.compat.open_seq2seq.schedules")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)


if not TYPE_CHECKING:  # A type checker would accept any name.
    __getattr__ = _find


def __dir__() -> list[str]:
    return [*globals(), *_MODEL_GARDEN, *_OPEN_SEQ2SEQ]
