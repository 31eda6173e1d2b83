"""Learning-rate schedules for large batches.

Every class here is a `keras.optimizers.schedules.LearningRateSchedule`: pass it to
an optimizer as the `learning_rate`. The first step is step 0. Schedules of the
TensorFlow Model Garden have the arithmetic of its
`official.modeling.optimization.lr_schedule`, and its configs load. OpenSeq2Seq's
learning-rate policies are classes here.
"""

from keras_lso.schedules._renamed import renamed
from keras_lso.schedules.keras_decays import (
    CosineDecayWithOffset,
    ExponentialDecayWithOffset,
    PiecewiseConstantDecayWithOffset,
    PolynomialDecayWithOffset,
)
from keras_lso.schedules.lookup import deserialize, get, serialize
from keras_lso.schedules.other_decays import (
    DirectPowerDecay,
    PowerAndLinearDecay,
    PowerDecayWithOffset,
    StepCosineDecayWithOffset,
)
from keras_lso.schedules.policies import FixedLR, PiecewiseConstant, TransformerPolicy
from keras_lso.schedules.policies_decay import (
    CosineDecayPolicy,
    ExpDecay,
    InvPolyDecay,
    PolyDecay,
)
from keras_lso.schedules.recipes import (
    LAMBRecipe,
    Recipe,
    linear_scaling,
    mlperf_bert,
    mlperf_resnet,
)
from keras_lso.schedules.sequential import JoinedSchedules
from keras_lso.schedules.warmup import LinearWarmup, PolynomialWarmUp, PolynomialWarmup

__all__ = [
    "CosineDecayPolicy",
    "CosineDecayWithOffset",
    "DirectPowerDecay",
    "ExpDecay",
    "ExponentialDecayWithOffset",
    "FixedLR",
    "InvPolyDecay",
    "JoinedSchedules",
    "LAMBRecipe",
    "LinearWarmup",
    "PiecewiseConstant",
    "PiecewiseConstantDecayWithOffset",
    "PolyDecay",
    "PolynomialDecayWithOffset",
    "PolynomialWarmUp",
    "PolynomialWarmup",
    "PowerAndLinearDecay",
    "PowerDecayWithOffset",
    "Recipe",
    "StepCosineDecayWithOffset",
    "TransformerPolicy",
    "deserialize",
    "get",
    "linear_scaling",
    "mlperf_bert",
    "mlperf_resnet",
    "serialize",
]

__getattr__ = renamed(
    __name__, CosineDecay="CosineDecayPolicy", Sequential="JoinedSchedules"
)
