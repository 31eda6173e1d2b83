"""`LAMB`: Adam with layer-wise adaptive rates, for large batches."""

import math

import keras
import numpy as np

from keras_lso._backend import backend, layer_rules
from keras_lso._checks import (
    check_bool,
    check_config,
    check_factor,
    check_rate,
    refusal,
)
from keras_lso._core.layer_adaptive import LayerAdaptive
from keras_lso._keras_internals.rates import updates_of


class LAMB(LayerAdaptive):
    """Adam with layer-wise adaptive rates.

    For the formula and the arguments see `keras_lso.LAMB`.
    """

    _default_learning_rate = 0.001
    _kind_of_decay = "takes part in the trust ratio"
    _tf_keras_slots = {"m": "momentums", "v": "velocities"}

    def __init__(
        self,
        learning_rate=_default_learning_rate,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        weight_decay_rate=0.0,
        exclude_from_weight_decay=None,
        exclude_from_layer_adaptation=None,
        name="LAMB",
        *,
        bias_correction=True,
        min_trust_ratio=None,
        max_trust_ratio=None,
        exclude_1d=False,
        **kwargs,
    ):
        beta_1, beta_2 = _check_beta("beta_1", beta_1), _check_beta("beta_2", beta_2)
        epsilon = check_rate("epsilon", epsilon)
        bias_correction = check_bool("bias_correction", bias_correction)
        min_trust_ratio, max_trust_ratio = _check_bounds(
            min_trust_ratio, max_trust_ratio
        )
        super().__init__(
            learning_rate,
            weight_decay_rate,
            exclude_from_weight_decay,
            exclude_from_layer_adaptation,
            exclude_1d,
            name,
            **kwargs,
        )
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        # As in the Model Garden: 0 / 0 would be NaN.
        self.epsilon = epsilon or keras.config.epsilon()
        self.bias_correction = bias_correction
        self.min_trust_ratio = min_trust_ratio
        self.max_trust_ratio = max_trust_ratio

    def _add_slots(self, variables):
        self.momentums, self.velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def _make_rules(self, learning_rate):
        learning_rate = self.decayed(learning_rate)
        dtype = keras.backend.standardize_dtype(learning_rate.dtype)
        upper = self.max_trust_ratio
        trust_ratio = layer_rules.TrustRatio(
            lower=self.min_trust_ratio or 0.0,
            upper=math.inf if upper is None else upper,
        )
        step = None
        if self.bias_correction:
            step = backend.scalar(updates_of(self), dtype) + 1
        return {
            (decays, adapts): layer_rules.LAMB(
                learning_rate=learning_rate,
                beta_1=_as_in_dtype(self.beta_1, dtype),
                beta_2=_as_in_dtype(self.beta_2, dtype),
                epsilon=self.epsilon,
                weight_decay=self.weight_decay_rate if decays else 0.0,
                trust_ratio=trust_ratio if adapts else None,
                step=step,
            )
            for decays in (True, False)
            for adapts in (True, False)
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from what `get_config` returned.

        Args:
            config: Dict. One of the `LAMB` of the Model Garden or of TensorFlow Addons,
                whose later versions say `weight_decay`, will do.
            custom_objects: Dict of names to classes that the config refers to.

        Returns:
            A `LAMB`.
        """
        config = check_config(cls.__name__, config)
        has_rate = "weight_decay_rate" in config
        # Keras's own `Lamb` says None where it has none.
        if not has_rate and config.get("weight_decay") is not None:
            config["weight_decay_rate"] = config.pop("weight_decay")
        return super().from_config(config, custom_objects=custom_objects)

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "beta_1": self.beta_1,
                "beta_2": self.beta_2,
                "epsilon": self.epsilon,
                "bias_correction": self.bias_correction,
                "min_trust_ratio": self.min_trust_ratio,
                "max_trust_ratio": self.max_trust_ratio,
            }
        )
        return config


def _as_in_dtype(beta, dtype):
    """Returns a beta as a tensor of this dtype would hold it.

    In float32 `1 - beta` is off by 5e-5 for a beta of 0.999. The bias correction, which
    is computed in float32, is then off by as much, and so it is in the Model Garden.
    """
    return beta if dtype == "float64" else float(np.float32(beta))


def _check_beta(argument, value):
    """Returns a float of at least 0 and below 1, with which `1 - beta` is no 0."""
    if value == 0 and not isinstance(value, bool):
        return 0.0
    beta = check_factor(argument, value, above=0.0, below=1.0)
    if _as_in_dtype(beta, "float32") == 1:
        raise refusal(argument, value, "be below 1 in float32")
    return beta


def _check_bounds(lower, upper):
    """Returns both as floats, or None."""
    if lower is not None:
        lower = check_rate("min_trust_ratio", lower)
    if upper is not None:
        upper = check_rate("max_trust_ratio", upper)
    if upper is not None and (lower or 0.0) > upper:
        raise ValueError(
            "`min_trust_ratio` must not exceed `max_trust_ratio`. Received: "
            f"min_trust_ratio={lower}, max_trust_ratio={upper}"
        )
    return lower, upper
