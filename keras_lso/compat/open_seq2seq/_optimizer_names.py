"""The optimizers that OpenSeq2Seq knew by name, with the arguments of TF1."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._checks import check_factor
from keras_lso._keras_internals.slots import slots_of
from keras_lso.lars import LARS
from keras_lso.novograd import NovoGrad


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """Makes an optimizer from the arguments that it had in TF1, or has in Keras.

    Args:
        make: The class, or a function of the same arguments.
        renamed: Dict of TF1's names to Keras's, where they differ.
        defaults: Dict of TF1's defaults, where they differ, under Keras's names.
    """

    make: Callable
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, **params):
        # Keras updates a variable from one place at a time, locked or not.
        params = {k: v for k, v in params.items() if k != "use_locking"}
        for old, new in self.renamed.items():
            if old in params and new in params:
                raise TypeError(
                    f"`{old}` is TF1's name for `{new}`: give one of them. Received: "
                    f"{old}={params[old]!r}, {new}={params[new]!r}"
                )
        params = {self.renamed.get(k, k): v for k, v in params.items()}
        return self.make(**{**self.defaults, **params})


def _momentum(momentum=None, nesterov=False, **params):
    """Returns TF1's momentum, into which the learning rate does not enter.

    `v = momentum * v + g; w = w - learning_rate * v`: LARS's popular momentum, in
    which no layer adapts.
    """
    if momentum is None:
        raise ValueError(
            "Momentum takes 'momentum', such as optimizer_params={'momentum': 0.9}. "
            "It has no default."
        )
    return LARS(
        momentum=momentum,
        nesterov=nesterov,
        classic_momentum=False,
        exclude_from_layer_adaptation=[""],
        **params,
    )


def _adagrad(initial_accumulator_value=0.1, **params):
    """Returns TF1's Adagrad. Without an epsilon, it must not start at 0."""
    check_factor("initial_accumulator_value", initial_accumulator_value, above=0.0)
    return keras.optimizers.Adagrad(
        initial_accumulator_value=initial_accumulator_value,
        **{"epsilon": 0.0, **params},
    )


def _adamw(weight_decay=None, **params):
    """Returns an AdamW that decays by the learning rate times `weight_decay`.

    TF1's does not multiply by the learning rate: OpenSeq2Seq did, before it made one.
    """
    if weight_decay is None:
        raise ValueError(
            "AdamW takes 'weight_decay', such as optimizer_params={'weight_decay': "
            "0.01}. It has no default."
        )
    return keras.optimizers.AdamW(weight_decay=weight_decay, **params)


@keras.saving.register_keras_serializable(
    "keras_lso", name="compat.open_seq2seq.RMSProp"
)
class RMSProp(keras.optimizers.RMSprop):
    """RMSprop whose averages start at 1, as in TF1. In Keras they start at 0.

    The first steps are shorter then: by a factor of 3 with the default `rho`.
    """

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        # Once, not at each step of the function in which this may be called.
        with backend.outside_of_functions():
            for average in slots_of(self)["rms"]:
                average.assign(ops.ones(average.shape, average.dtype))


_BETAS = {"beta1": "beta_1", "beta2": "beta_2"}

OPTIMIZER_CLS_NAMES = {
    "Adagrad": NamedOptimizer(_adagrad),
    "Adam": NamedOptimizer(keras.optimizers.Adam, _BETAS, {"epsilon": 1e-8}),
    "AdamW": NamedOptimizer(_adamw, _BETAS, {"epsilon": 1e-8}),
    "Ftrl": NamedOptimizer(keras.optimizers.Ftrl),
    "LARS": NamedOptimizer(LARS),
    "Momentum": NamedOptimizer(_momentum, {"use_nesterov": "nesterov"}),
    "NovoGrad": NamedOptimizer(
        NovoGrad, {**_BETAS, "weight_decay": "weight_decay_rate"}
    ),
    "RMSProp": NamedOptimizer(RMSProp, {"decay": "rho"}, {"epsilon": 1e-10}),
    "SGD": NamedOptimizer(keras.optimizers.SGD),
}
