"""The names of OpenSeq2Seq's optimizers package."""

from keras_lso.compat.open_seq2seq import (
    automatic_loss_scaler,
    lr_policies,
    mp_wrapper,
    optimizers,
)
from keras_lso.compat.open_seq2seq.automatic_loss_scaler import AutomaticLossScaler
from keras_lso.compat.open_seq2seq.lr_policies import (
    cosine_decay,
    exp_decay,
    fixed_lr,
    inv_poly_decay,
    piecewise_constant,
    poly_decay,
    transformer_policy,
)
from keras_lso.compat.open_seq2seq.mp_wrapper import MixedPrecisionOptimizerWrapper
from keras_lso.compat.open_seq2seq.optimizers import (
    OPTIMIZER_CLS_NAMES,
    OPTIMIZER_SUMMARIES,
    _clip_by_global_norm,
    _clip_gradients_by_norm,
    get_regularization_loss,
    optimize_loss,
)
from keras_lso.compat.open_seq2seq.schedules import (
    CosineDecayPolicy,
    ExpDecay,
    InvPolyDecay,
    PiecewiseConstant,
    PolyDecay,
    TransformerPolicy,
)
from keras_lso.schedules._plain import FixedLR

__all__ = [
    "TransformerPolicy",
    "PolyDecay",
    "PiecewiseConstant",
    "InvPolyDecay",
    "FixedLR",
    "ExpDecay",
    "CosineDecayPolicy",
    "OPTIMIZER_CLS_NAMES",
    "OPTIMIZER_SUMMARIES",
    "AutomaticLossScaler",
    "MixedPrecisionOptimizerWrapper",
    "_clip_by_global_norm",
    "_clip_gradients_by_norm",
    "automatic_loss_scaler",
    "cosine_decay",
    "exp_decay",
    "fixed_lr",
    "get_regularization_loss",
    "inv_poly_decay",
    "lr_policies",
    "mp_wrapper",
    "optimize_loss",
    "optimizers",
    "piecewise_constant",
    "poly_decay",
    "transformer_policy",
]
