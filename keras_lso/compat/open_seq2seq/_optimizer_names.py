"""The optimizers that OpenSeq2Seq has names for, with the arguments of TF1."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import check_positive
from keras_lso._keras_internals.slots import slots_of
from keras_lso.optimizers.lars import LARS
from keras_lso.optimizers.novograd import NovoGrad


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """Constructs an optimizer from its arguments in TF1 or in Keras.

    `renamed` maps the names of arguments in TF1 to their names in Keras. `defaults`
    maps names in Keras to the defaults in TF1, where these differ from Keras's.
    `required` is an argument that has a default in Keras, and must be given.
    """

    make: Callable[..., keras.optimizers.Optimizer]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: str | None = None

    def __call__(self, **params: Any) -> keras.optimizers.Optimizer:
        # Keras never updates a variable concurrently.
        params.pop("use_locking", None)
        if self.required is not None and params.get(self.required) is None:
            raise ValueError(
                f"`optimizer_params` must hold {self.required!r}: it has no default. "
                f"Received: optimizer_params={params!r}"
            )
        for old, new in self.renamed.items():
            if old in params and new in params:
                raise TypeError(
                    f"`{old}` is TF1's name for `{new}`: give one of them. Received: "
                    f"{old}={params[old]!r}, {new}={params[new]!r}"
                )
        params = {self.renamed.get(k, k): v for k, v in params.items()}
        return self.make(**{**self.defaults, **params})


def _adagrad(initial_accumulator_value, **params):
    # Without an epsilon, the accumulator must not start at 0.
    start = check_positive("initial_accumulator_value", initial_accumulator_value)
    return keras.optimizers.Adagrad(initial_accumulator_value=start, **params)


@keras.saving.register_keras_serializable(
    "keras_lso", name="compat.open_seq2seq.RMSProp"
)
class RMSProp(keras.optimizers.RMSprop):
    """RMSprop with averages initialised to 1, as in TF1: the first steps are short."""

    def build(self, variables: Iterable[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        # Once, not in each step of a `tf.function` that calls `build`.
        with backend.host.outside_of_functions():
            for average in slots_of(self)["rms"]:
                average.assign(ops.ones(average.shape, average.dtype))


_BETAS = {"beta1": "beta_1", "beta2": "beta_2"}

OPTIMIZER_CLS_NAMES = {
    "Adagrad": NamedOptimizer(
        _adagrad, defaults={"initial_accumulator_value": 0.1, "epsilon": 0.0}
    ),
    "Adam": NamedOptimizer(keras.optimizers.Adam, _BETAS, {"epsilon": 1e-8}),
    # It decays by the learning rate times `weight_decay`, as in OpenSeq2Seq, not TF1.
    "AdamW": NamedOptimizer(
        keras.optimizers.AdamW, _BETAS, {"epsilon": 1e-8}, "weight_decay"
    ),
    "Ftrl": NamedOptimizer(keras.optimizers.Ftrl),
    "LARS": NamedOptimizer(LARS),
    # TF1's `v = momentum * v + g; w = w - learning_rate * v`: LARS's popular momentum.
    "Momentum": NamedOptimizer(
        LARS,
        {"use_nesterov": "nesterov"},
        {"classic_momentum": False, "exclude_from_layer_adaptation": [""]},
        "momentum",
    ),
    "NovoGrad": NamedOptimizer(
        NovoGrad, {**_BETAS, "weight_decay": "weight_decay_rate"}
    ),
    "RMSProp": NamedOptimizer(RMSProp, {"decay": "rho"}, {"epsilon": 1e-10}),
    "SGD": NamedOptimizer(keras.optimizers.SGD),
}
