"""`LARS`: layer-wise adaptive rate scaling, for large batches."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import keras

from keras_lso._backend.rule import LayerAdaptiveRule, TrustRatio, always
from keras_lso._backend.tensors import Tensor
from keras_lso._core.exclusions import Patterns
from keras_lso._core.fields import Rate, Share, registered
from keras_lso._keras_internals.rules import steps_by
from keras_lso.optimizers.base import LayerAdaptive, LearningRate, arguments_of


@dataclass(frozen=True)
class LARSRule(LayerAdaptiveRule):
    """Layer-wise adaptive rate scaling, in the formulas of `keras_lso.LARS`."""

    squares = False
    slots: ClassVar[dict[str, str]] = {"momentum": "momentums"}
    learning_rate: Any
    momentum: float
    weight_decay: float
    trust_ratio: TrustRatio | None
    nesterov: bool = False
    classic_momentum: bool = True

    @classmethod
    def of_groups(cls, optimizer: Any, learning_rate: Tensor) -> dict[Any, Any]:
        trust_ratio = TrustRatio(
            optimizer.eeta,
            optimizer.epsilon,
            upper=1.0 if optimizer.trust_clip else math.inf,
            paper=optimizer.trust_ratio == "paper",
        )
        learning_rate = optimizer.decayed(learning_rate)
        return optimizer._rules_of_groups(trust_ratio, learning_rate=learning_rate)

    @property
    def kernel(self) -> str | None:  # type: ignore[override]
        """The kernel of the last pass; see `descent`."""
        return "descent" if self.classic_momentum else None

    @property
    def is_paper(self) -> bool:
        """Whether the trust ratio is the paper's."""
        return self.trust_ratio is not None and self.trust_ratio.paper

    def measured(self, xp: Any, g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns the direction behind the trust ratio, and the variable.

        An inf or a NaN in the gradient shows in the norm of the direction.
        """
        if self.is_paper:
            return g, w
        d = self.decayed(g, w)
        return d if self.classic_momentum else self.advance(always, d, v)[1], w

    def decayed(self, g: Tensor, w: Tensor) -> Tensor:
        """Returns the gradient of the loss with its L2 penalty."""
        return g + w * self.weight_decay if self.weight_decay else g

    def descent(self, g: Tensor, w: Tensor, norms: Any) -> Tensor:
        """Returns what classic momentum adds up."""
        d = self.decayed(g, w)
        return d * self.rate(norms, g if self.is_paper else d, w)

    def advance(self, select: Any, d: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns the new momentum, and its update."""
        v = select(v * self.momentum + d, v)
        return v, (v * self.momentum + d if self.nesterov else v)

    def __call__(
        self, xp: Any, select: Any, g: Tensor, w: Tensor, v: Tensor, norms: Any = None
    ) -> tuple[Tensor, ...]:
        if self.classic_momentum:
            v, update = self.advance(select, self.descent(g, w, norms), v)
        else:
            v, update = self.advance(select, self.decayed(g, w), v)
            update = update * self.rate(norms, update, w)
        return select(w - update, w), v


@steps_by(LARSRule)
@registered("LARS")
class LARS(LayerAdaptive):
    """Optimizer that gives each layer its own learning rate.

    LARS moves each layer by a share `eeta` of the norm of its weights, whatever the
    norm of its gradient. No layer then diverges at a learning rate that is high enough
    for large batches.

    ```python
    d = g + weight_decay_rate * w
    trust_ratio = eeta * |w| / |d|                          # 1 where a norm is 0

    v = momentum * v + learning_rate * trust_ratio * d
    w = w - v                                               # nesterov=False
    w = w - (momentum * v + learning_rate * trust_ratio * d)    # nesterov=True
    ```

    With `classic_momentum=False` the learning rate does not enter the momentum, and
    the trust ratio is computed from the update:

    ```python
    v = momentum * v + d
    u = v                                                   # nesterov=False
    u = momentum * v + d                                    # nesterov=True
    trust_ratio = eeta * |w| / |u|                          # 1 where a norm is 0
    w = w - learning_rate * trust_ratio * u
    ```

    Norms are taken of whole variables and accumulated in float32 at least. A norm above
    1.8e19 counts as infinite (the layer does not move), a norm below 1e-22 as 0. Trust
    ratios are computed from unscaled gradients: for float16 write
    `keras_lso.LossScaleOptimizer(LARS(...))`.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`,
            or a callable without arguments. It is far higher than the learning rate of
            SGD: 10 for a ResNet-50 at batch size 4,096. Defaults to `0.01`.
        momentum: Between 0 and 1. Defaults to `0.9`.
        weight_decay_rate: The factor of the L2 penalty's gradient, which takes part in
            the trust ratio. Defaults to `0.0`.
        eeta: The share of a layer's norm by which it moves at a learning rate of 1; the
            paper's trust coefficient. Defaults to `0.001`.
        nesterov: Whether to use Nesterov momentum. Defaults to `False`.
        classic_momentum: Whether the learning rate enters the momentum. Defaults to
            `True`.
        exclude_from_weight_decay: Regular expressions. A variable is not decayed if
            one of them matches in its path (`"block/bn/gamma"`). Defaults to `None`:
            all variables are decayed, except those that the method of the same name
            excludes. `build` warns of a pattern that matches nothing.
        exclude_from_layer_adaptation: Regular expressions. A variable has a trust
            ratio of 1 if one of them matches in its path. Defaults to `None`: the same
            as `exclude_from_weight_decay`. An empty list excludes no variable.
        name: The name of the optimizer. Defaults to `"LARS"`.
        trust_ratio: `"model_garden"`, as above, or `"paper"`, as in the paper and
            in MLPerf's reference, for classic momentum only:
            `eeta * |w| / (|g| + weight_decay_rate * |w| + epsilon)`, and 1 where `|w|`
            or `|g|` is 0. Defaults to `"model_garden"`.
        epsilon: Added to the denominator of the trust ratio. Defaults to `0.0`.
        trust_clip: Whether trust ratios above 1 become 1. Defaults to `False`.
        exclude_1d: Whether to exclude every variable with fewer than two dimensions,
            such as biases and the weights of normalization, from both decay and
            adaptation, as MLPerf and MoCo do. Defaults to `False`.
        **kwargs: The keywords of every Keras optimizer (`clipnorm`, `use_ema`,
            `gradient_accumulation_steps`, ...), and two of tf.keras: `lr`, another name
            of `learning_rate`, and `decay`, which divides the learning rate by
            `1 + decay * iterations`.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.LARS(learning_rate=10.0, momentum=0.9)
    >>> w = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([keras.ops.array([0.0, 100.0])], [w])
    >>> print(w.numpy())  # |w| is 5: a step of 10 * 0.001 * 5
    [3.   3.95]

    References:

    - [You, Gitman, Ginsburg, 2017, Large Batch Training of Convolutional Networks](
        https://arxiv.org/abs/1708.03888)
    - [TensorFlow Model Garden, `tfm.optimization.lars.LARS`](
        https://www.tensorflow.org/api_docs/python/tfm/optimization/lars/LARS)
    """

    _default_learning_rate = 0.01
    _kind_of_decay = "is an L2 penalty that takes part in the trust ratio"
    _tf_keras_slots = {"momentum": "momentums"}
    momentum: float
    eeta: float
    nesterov: bool
    classic_momentum: bool
    trust_ratio: Literal["model_garden", "paper"]
    epsilon: float
    trust_clip: bool
    momentums: list[keras.Variable]

    def __init__(
        self,
        learning_rate: LearningRate | None = None,
        momentum: Share = 0.9,
        weight_decay_rate: Rate = 0.0,
        eeta: Rate = 0.001,
        nesterov: bool = False,
        classic_momentum: bool = True,
        exclude_from_weight_decay: Patterns = None,
        exclude_from_layer_adaptation: Patterns = None,
        name: str = "LARS",
        *,
        trust_ratio: Literal["model_garden", "paper"] = "model_garden",
        epsilon: Rate = 0.0,
        trust_clip: bool = False,
        exclude_1d: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**arguments_of(locals()))
        if trust_ratio == "paper" and not classic_momentum:
            raise ValueError(
                "The paper's trust ratio is computed from the gradient, so "
                "trust_ratio='paper' needs classic_momentum=True. For popular momentum "
                "write trust_ratio='model_garden'. Received: classic_momentum=False"
            )
