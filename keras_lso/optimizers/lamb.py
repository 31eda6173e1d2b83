"""`LAMB`: Adam with layer-wise adaptive rates, for large batches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import keras
import numpy as np
from keras import ops

from keras_lso._backend.rule import LayerAdaptiveRule, TrustRatio, always
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import check_bounds, check_config, check_rate, refusal
from keras_lso._core.exclusions import Patterns
from keras_lso._core.fields import Rate, registered
from keras_lso._keras_internals.rules import number_of_update, steps_by
from keras_lso.optimizers.base import LayerAdaptive, LearningRate, arguments_of


@dataclass(frozen=True)
class LAMBRule(LayerAdaptiveRule):
    """Adam with a trust ratio, in the formulas of `keras_lso.LAMB`."""

    slots: ClassVar[dict[str, str]] = {
        "momentum": "momentums",
        "velocity": "velocities",
    }
    learning_rate: Any
    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float
    trust_ratio: TrustRatio | None
    # By which the moments are divided, or None.
    corrections: tuple[Any, ...]

    @classmethod
    def of_groups(cls, optimizer: Any, learning_rate: Tensor) -> dict[Any, Any]:
        learning_rate = optimizer.decayed(learning_rate)
        dtype = keras.backend.standardize_dtype(learning_rate.dtype)
        upper = optimizer.max_trust_ratio
        trust_ratio = TrustRatio(
            lower=optimizer.min_trust_ratio or 0.0,
            upper=math.inf if upper is None else upper,
        )
        betas = [optimizer.beta_1, optimizer.beta_2]
        if dtype != "float64":
            # In float32, `1 - beta` has few correct digits for a beta of 0.999. The
            # bias correction then has the same error, as in the Model Garden.
            betas = [float(np.float32(beta)) for beta in betas]
        step = number_of_update(optimizer, dtype)
        corrects = optimizer.bias_correction
        # In float32 `1 - beta**2` has four digits for a beta of 0.999.
        corrections = tuple(
            -ops.expm1(step * math.log(beta)) if corrects and beta else None
            for beta in betas
        )
        return optimizer._rules_of_groups(
            trust_ratio,
            learning_rate=learning_rate,
            beta_1=betas[0],
            beta_2=betas[1],
            corrections=corrections,
        )

    def measured(
        self, xp: Any, g: Tensor, w: Tensor, m: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the direction of the step, and the variable.

        An inf or a NaN in the gradient makes the direction's norm NaN: inf / inf.
        """
        return self.advance(xp, always, g, w, m, v)[-1], w

    def advance(
        self, xp: Any, select: Any, g: Tensor, w: Tensor, m: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the new moments, and their direction."""
        m = select(m * self.beta_1 + g * (1 - self.beta_1), m)
        v = select(v * self.beta_2 + xp.square(g) * (1 - self.beta_2), v)
        m_hat, v_hat = (
            moment if correction is None else moment / correction
            for moment, correction in zip((m, v), self.corrections, strict=True)
        )
        d = m_hat / (xp.sqrt(v_hat) + self.epsilon)
        return m, v, d + w * self.weight_decay if self.weight_decay else d

    def __call__(
        self, xp: Any, select: Any, g: Tensor, w: Tensor, *moments: Tensor, norms: Any
    ) -> tuple[Tensor, ...]:
        m, v, d = self.advance(xp, select, g, w, *moments)
        return select(w - d * self.rate(norms, d, w), w), m, v


def _check_beta(argument: str, value: Any) -> float:
    """Returns a float of at least 0 and below 1, in float32 too."""
    beta = check_rate(argument, value)
    if np.float32(beta) >= 1:
        raise refusal(argument, value, "be below 1 in float32")
    return beta


_Beta = Annotated[float, _check_beta]


@steps_by(LAMBRule)
@registered("LAMB")
class LAMB(LayerAdaptive):
    """Optimizer that gives each layer its own learning rate, on top of Adam.

    LAMB moves each layer in the direction of Adam with weight decay. The length of the
    move is a share of the norm of the layer's weights: `learning_rate` is that share.
    LAMB trains transformers at batch sizes where one rate for all layers is too high
    for some of the layers.

    ```python
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    m_hat = m / (1 - beta_1**t)             # bias_correction=False: m_hat = m
    v_hat = v / (1 - beta_2**t)             # bias_correction=False: v_hat = v
    d = m_hat / (sqrt(v_hat) + epsilon) + weight_decay_rate * w

    trust_ratio = min(max(|w| / |d|, min_trust_ratio), max_trust_ratio)
    trust_ratio = 1 where |w| or |d| is 0
    w = w - learning_rate * trust_ratio * d
    ```

    `t` is the number of this update, from 1. This is Algorithm 2 of the paper, except
    that the paper bounds `|w|`, and this class bounds the ratio if you give a bound.

    Norms are taken of whole variables and accumulated in float32 at least. Trust ratios
    are computed from unscaled gradients: for float16 write
    `keras_lso.LossScaleOptimizer(LAMB(...))`.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`,
            or a callable without arguments. Defaults to `0.001`.
        beta_1: At least 0 and below 1. The decay of the mean of the gradients. Defaults
            to `0.9`.
        beta_2: At least 0 and below 1. The decay of the mean of their squares. Defaults
            to `0.999`.
        epsilon: Added to the root of the mean of the squares. 0 means
            `keras.config.epsilon()`, as in the Model Garden. Defaults to `1e-6`.
        weight_decay_rate: The factor of the weights in the direction, which takes part
            in the trust ratio. Defaults to `0.0`.
        exclude_from_weight_decay: Regular expressions. A variable is not decayed if
            one of them matches in its path (`"block/layer_norm/gamma"`). Defaults to
            `None`: all variables are decayed, except those that the method of the same
            name excludes. `build` warns of a pattern that matches nothing.
        exclude_from_layer_adaptation: Regular expressions. A variable has a trust
            ratio of 1 if one of them matches in its path. Defaults to `None`: the same
            as `exclude_from_weight_decay`. An empty list excludes no variable.
        name: The name of the optimizer. Defaults to `"LAMB"`.
        bias_correction: Whether to correct the moments for their bias towards the
            initial zeros. Defaults to `True`.
        min_trust_ratio: The lower bound of the trust ratio. Defaults to `None`: no
            lower bound.
        max_trust_ratio: The upper bound of the trust ratio. Defaults to `None`: no
            upper bound.
        exclude_1d: Whether to exclude every variable with fewer than two dimensions,
            such as biases and the weights of normalization, from both decay and
            adaptation. Defaults to `False`.
        **kwargs: The keywords of every Keras optimizer (`clipnorm`, `use_ema`,
            `gradient_accumulation_steps`, ...), and two of tf.keras: `lr`, another name
            of `learning_rate`, and `decay`, which divides the learning rate by
            `1 + decay * iterations`.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.LAMB(learning_rate=0.1)
    >>> w = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([keras.ops.array([0.0, 100.0])], [w])
    >>> print(w.numpy())  # |w| is 5: a step of 0.1 * 5
    [3.  3.5]

    References:

    - [You et al., 2020, Large Batch Optimization for Deep Learning: Training BERT in
        76 minutes](https://arxiv.org/abs/1904.00962), Algorithm 2
    - [TensorFlow Model Garden, `tfm.optimization.lamb.LAMB`](
        https://www.tensorflow.org/api_docs/python/tfm/optimization/lamb/LAMB)
    """

    _default_learning_rate = 0.001
    _kind_of_decay = "takes part in the trust ratio"
    momentums: list[keras.Variable]
    velocities: list[keras.Variable]
    beta_1: float
    beta_2: float
    epsilon: float
    bias_correction: bool
    min_trust_ratio: float | None
    max_trust_ratio: float | None
    _tf_keras_slots = {"m": "momentums", "v": "velocities"}

    def __init__(
        self,
        learning_rate: LearningRate | None = None,
        beta_1: _Beta = 0.9,
        beta_2: _Beta = 0.999,
        epsilon: Rate = 1e-6,
        weight_decay_rate: Rate = 0.0,
        exclude_from_weight_decay: Patterns = None,
        exclude_from_layer_adaptation: Patterns = None,
        name: str = "LAMB",
        *,
        bias_correction: bool = True,
        min_trust_ratio: Rate | None = None,
        max_trust_ratio: Rate | None = None,
        exclude_1d: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**arguments_of(locals()))
        # As in the Model Garden: 0 / 0 would be NaN.
        self.epsilon = self.epsilon or keras.config.epsilon()
        lower, upper = self.min_trust_ratio, self.max_trust_ratio
        if lower is not None and upper is not None:
            check_bounds(lower, upper, ("min_trust_ratio", "max_trust_ratio"))

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        config = check_config(cls.__name__, config)
        # Later versions of TensorFlow Addons call it so. The config of Keras's own
        # `Lamb` says None if it has no weight decay.
        if "weight_decay_rate" not in config and config.get("weight_decay") is not None:
            config["weight_decay_rate"] = config.pop("weight_decay")
        return super().from_config(config, custom_objects=custom_objects)
