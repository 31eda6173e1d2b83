"""The names of OpenSeq2Seq's optimizers package.

The source of all is [its page](
https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html).
"""

from keras_lso.compat.open_seq2seq import (
    automatic_loss_scaler,
    lr_policies,
    mp_wrapper,
    optimizers,
)
from keras_lso.compat.open_seq2seq.automatic_loss_scaler import AutomaticLossScaler
from keras_lso.compat.open_seq2seq.lr_policies import *  # noqa: F403
from keras_lso.compat.open_seq2seq.mp_wrapper import MixedPrecisionOptimizerWrapper
from keras_lso.compat.open_seq2seq.optimizers import *  # noqa: F403
from keras_lso.compat.open_seq2seq.schedules import (
    CosineDecayPolicy,
    ExpDecay,
    InvPolyDecay,
    PiecewiseConstant,
    PolyDecay,
    TransformerPolicy,
)
from keras_lso.schedules.runs import FixedLR

__all__ = [
    *lr_policies.__all__,
    *optimizers.__all__,
    "AutomaticLossScaler",
    "CosineDecayPolicy",
    "ExpDecay",
    "FixedLR",
    "InvPolyDecay",
    "MixedPrecisionOptimizerWrapper",
    "PiecewiseConstant",
    "PolyDecay",
    "TransformerPolicy",
    "automatic_loss_scaler",
    "lr_policies",
    "mp_wrapper",
    "optimizers",
]


def __dir__() -> list[str]:
    return __all__
