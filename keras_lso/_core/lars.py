"""`LARS`: layer-wise adaptive rate scaling, for large batches."""

import math

from keras_lso._backend import layer_rules
from keras_lso._checks import check_bool, check_rate, check_share
from keras_lso._core.layer_adaptive import LayerAdaptive
from keras_lso._option_checks import check_choice

MODEL_GARDEN, PAPER = TRUST_RATIOS = ("model_garden", "paper")


class LARS(LayerAdaptive):
    """Layer-wise adaptive rate scaling.

    For the formula and the arguments see `keras_lso.LARS`.
    """

    _default_learning_rate = 0.01
    _kind_of_decay = "is an L2 penalty that takes part in the trust ratio"
    _tf_keras_slots = {"momentum": "momentums"}

    def __init__(
        self,
        learning_rate=_default_learning_rate,
        momentum=0.9,
        weight_decay_rate=0.0,
        eeta=0.001,
        nesterov=False,
        classic_momentum=True,
        exclude_from_weight_decay=None,
        exclude_from_layer_adaptation=None,
        name="LARS",
        *,
        trust_ratio=MODEL_GARDEN,
        epsilon=0.0,
        trust_clip=False,
        exclude_1d=False,
        **kwargs,
    ):
        momentum = check_share("momentum", momentum)
        eeta = check_rate("eeta", eeta)
        nesterov = check_bool("nesterov", nesterov)
        classic_momentum = check_bool("classic_momentum", classic_momentum)
        check_choice("trust_ratio", trust_ratio, TRUST_RATIOS)
        epsilon = check_rate("epsilon", epsilon)
        trust_clip = check_bool("trust_clip", trust_clip)
        _check_together(trust_ratio, classic_momentum)
        super().__init__(
            learning_rate,
            weight_decay_rate,
            exclude_from_weight_decay,
            exclude_from_layer_adaptation,
            exclude_1d,
            name,
            **kwargs,
        )
        self.momentum = momentum
        self.eeta = eeta
        self.nesterov = nesterov
        self.classic_momentum = classic_momentum
        self.trust_ratio = trust_ratio
        self.epsilon = epsilon
        self.trust_clip = trust_clip

    def _add_slots(self, variables):
        self.momentums = self.add_optimizer_variables(variables, "momentum")

    def _make_rules(self, learning_rate):
        learning_rate = self.decayed(learning_rate)
        trust_ratio = layer_rules.TrustRatio(
            self.eeta,
            self.epsilon,
            upper=1.0 if self.trust_clip else math.inf,
            paper=self.trust_ratio == PAPER,
        )
        return {
            (decays, adapts): layer_rules.LARS(
                learning_rate=learning_rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay_rate if decays else 0.0,
                trust_ratio=trust_ratio if adapts else None,
                nesterov=self.nesterov,
                classic_momentum=self.classic_momentum,
            )
            for decays in (True, False)
            for adapts in (True, False)
        }

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "momentum": self.momentum,
                "eeta": self.eeta,
                "nesterov": self.nesterov,
                "classic_momentum": self.classic_momentum,
                "trust_ratio": self.trust_ratio,
                "epsilon": self.epsilon,
                "trust_clip": self.trust_clip,
            }
        )
        return config


def _check_together(trust_ratio, classic_momentum):
    """Refuses arguments that contradict each other."""
    if trust_ratio == PAPER and not classic_momentum:
        raise ValueError(
            "The paper's trust ratio is of the gradient, before it enters the "
            "momentum, so trust_ratio='paper' needs classic_momentum=True. "
            "Received: classic_momentum=False. For popular momentum write "
            "trust_ratio='model_garden'."
        )
