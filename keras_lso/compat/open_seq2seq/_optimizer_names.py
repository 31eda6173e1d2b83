"""The optimizers that OpenSeq2Seq has names for, with the arguments of TF1."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import check_factor
from keras_lso._keras_internals.slots import slots_of
from keras_lso.optimizers.lars import LARS
from keras_lso.optimizers.novograd import NovoGrad


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """Constructs an optimizer from its arguments in TF1 or in Keras.

    `renamed` maps the names of arguments in TF1 to their names in Keras. `defaults`
    maps names in Keras to the defaults in TF1, where these differ from Keras's.
    """

    make: Callable[..., keras.optimizers.Optimizer]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, **params: Any) -> keras.optimizers.Optimizer:
        # Keras never updates a variable concurrently.
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
    """Returns SGD with TF1's momentum, which excludes the learning rate.

    The update is `v = momentum * v + g; w = w - learning_rate * v`. This is the popular
    momentum of LARS, with all layers excluded from adaptation.
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


def _adagrad(initial_accumulator_value, **params):
    # Without an epsilon, the accumulator must not start at 0.
    check_factor("initial_accumulator_value", initial_accumulator_value, above=0.0)
    return keras.optimizers.Adagrad(
        initial_accumulator_value=initial_accumulator_value, **params
    )


def _adamw(weight_decay=None, **params):
    """Returns an AdamW that decays by the learning rate times `weight_decay`.

    TF1's AdamW does not multiply by the learning rate, but OpenSeq2Seq did.
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
    """RMSprop with averages initialised to 1, as in TF1. Keras initialises them to 0.

    This shortens the first steps.
    """

    def build(self, variables: Iterable[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        # Once, not in each step of a `tf.function` that calls `build`.
        with backend.outside_of_functions():
            for average in slots_of(self)["rms"]:
                average.assign(ops.ones(average.shape, average.dtype))


_BETAS = {"beta1": "beta_1", "beta2": "beta_2"}

OPTIMIZER_CLS_NAMES = {
    "Adagrad": NamedOptimizer(
        _adagrad, defaults={"initial_accumulator_value": 0.1, "epsilon": 0.0}
    ),
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
