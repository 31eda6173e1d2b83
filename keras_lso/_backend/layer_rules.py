"""The formulas of the optimizers that treat each layer by its norm.

These are LARS, LAMB and NovoGrad. See `rules.py`, which has the others. LARC has the
trust ratio from here.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from keras import ops

from keras_lso._backend.rules import KerasRule, Rule, always
from keras_lso._backend.scalars import Scalars

_SCALARS = Scalars()


@dataclass(frozen=True)
class TrustRatio:
    """How far a layer may move, relative to its norm.

    ```python
    ratio = eeta * |w| / (|d| + epsilon)                        # paper=False
    ratio = eeta * |w| / (|d| + weight_decay * |w| + epsilon)   # paper=True
    ratio = min(max(ratio, lower), upper)
    ratio = 1 where |w| or |d| is 0
    ```
    """

    eeta: float = 1.0
    epsilon: float = 0.0
    lower: float = 0.0
    upper: float = math.inf
    paper: bool = False

    def fraction(self, d_norm, w_norm, weight_decay=0.0):
        """Returns the numerator and the denominator of the ratio without its limits.

        Both may be 0. A NaN ends a program under JAX's `jax_debug_nans`, also where a
        `where` leaves it out afterwards.
        """
        denominator = d_norm + self.epsilon
        if self.paper:
            denominator = denominator + weight_decay * w_norm
        return self.eeta * w_norm, denominator

    def __call__(self, d_norm, w_norm, weight_decay, scalars=_SCALARS):
        """Returns the ratio; `scalars` are the `Scalars` to compute it by."""
        numerator, denominator = self.fraction(d_norm, w_norm, weight_decay)
        one, usable = scalars.ones_like(numerator), (w_norm > 0) & (d_norm > 0)
        ratio = scalars.where(usable, numerator, one) / denominator
        # Not finite: of a variable so large that its norm overflows.
        usable = usable & (ratio < math.inf)
        if self.lower > 0:
            ratio = ops.maximum(ratio, self.lower)
        if self.upper < math.inf:
            ratio = ops.minimum(ratio, self.upper)
        return scalars.where(usable, ratio, one)


class LayerAdaptive(Rule):
    """A rule whose steps a trust ratio rescales, layer by layer, if it has one."""

    has_norms: ClassVar = True
    learning_rate: Any
    weight_decay: float
    trust_ratio: TrustRatio | None

    @property
    def takes_norms(self):
        return self.trust_ratio is not None

    def rate(self, norms, scalars=_SCALARS):
        """Returns the learning rate of a layer with these norms; see `TrustRatio`."""
        if self.trust_ratio is None:
            return self.learning_rate
        d_norm, w_norm = norms
        ratio = self.trust_ratio(d_norm, w_norm, self.weight_decay, scalars)
        return self.learning_rate * ratio


@dataclass(frozen=True)
class LARS(LayerAdaptive):
    """Layer-wise adaptive rate scaling, as in `keras_lso.LARS`.

    ```python
    d = g + weight_decay * w

    # classic_momentum=True; paper: the trust ratio is of g
    d = learning_rate * trust_ratio(|d|, |w|) * d
    v = momentum * v + d
    w = w - v                                           # nesterov=False
    w = w - (momentum * v + d)                          # nesterov=True

    # classic_momentum=False
    v = momentum * v + d
    u = v                                               # nesterov=False
    u = momentum * v + d                                # nesterov=True
    w = w - learning_rate * trust_ratio(|u|, |w|) * u
    ```
    """

    slots: ClassVar = ("momentum",)
    uses_gradient_norms: ClassVar = True
    learning_rate: Any
    momentum: float
    weight_decay: float
    trust_ratio: TrustRatio | None
    nesterov: bool = False
    classic_momentum: bool = True

    @property
    def is_paper(self):
        """Whether the trust ratio is the paper's."""
        return self.trust_ratio is not None and self.trust_ratio.paper

    def measured(self, g, w, v):
        """Returns the direction that the trust ratio is taken of, and the variable.

        An inf or a NaN in the gradient is one in the norm of the first of them.
        """
        if self.is_paper:
            return g, w
        d = self.decayed(g, w)
        return d if self.classic_momentum else self.advance(always, d, v)[1], w

    def decayed(self, g, w):
        """Returns the gradient of the loss with its L2 penalty."""
        return g + w * self.weight_decay if self.weight_decay else g

    def advance(self, select, d, v):
        """Returns the new momentum, and the update that goes with it."""
        v = select(v * self.momentum + d, v)
        return v, (v * self.momentum + d if self.nesterov else v)

    def __call__(self, select, g, w, v, norms=None):
        rate = self.rate(norms)
        d = self.decayed(g, w)
        if self.classic_momentum:
            v, update = self.advance(select, d * rate, v)
        else:
            v, update = self.advance(select, d, v)
            update = update * rate
        return select(w - update, w), v


@dataclass(frozen=True)
class LAMB(LayerAdaptive):
    """Adam with a trust ratio, as in `keras_lso.LAMB`.

    ```python
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    m_hat, v_hat = m, v                                 # step=None
    m_hat, v_hat = m / (1 - beta_1**step), v / (1 - beta_2**step)
    d = m_hat / (sqrt(v_hat) + epsilon) + weight_decay * w
    w = w - learning_rate * trust_ratio(|d|, |w|) * d
    ```

    `step` is the number of this update, from 1, a scalar tensor.
    """

    slots: ClassVar = ("momentum", "velocity")
    learning_rate: Any
    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float
    trust_ratio: TrustRatio | None
    step: Any

    def measured(self, g, w, m, v):
        """Returns the direction of the step, and the variable.

        An inf or a NaN in the gradient is a NaN in the norm of the first: inf / inf.
        """
        return self.advance(always, g, w, m, v)[-1], w

    def advance(self, select, g, w, m, v):
        """Returns the new moments, and the direction that goes with them."""
        m = select(m * self.beta_1 + g * (1 - self.beta_1), m)
        v = select(v * self.beta_2 + ops.square(g) * (1 - self.beta_2), v)
        root = ops.sqrt(self.corrected(v, self.beta_2))
        d = self.corrected(m, self.beta_1) / (root + self.epsilon)
        return m, v, d + w * self.weight_decay if self.weight_decay else d

    def corrected(self, moment, beta):
        """Returns a moment without its bias towards the zeros that it began with."""
        if self.step is None or beta == 0:
            return moment
        # In float32 `1 - beta**2` has four digits for a beta of 0.999.
        return moment / -ops.expm1(self.step * math.log(beta))

    def __call__(self, select, g, w, m, v, norms=None):
        m, v, d = self.advance(select, g, w, m, v)
        return select(w - d * self.rate(norms), w), m, v


@dataclass(frozen=True)
class KerasLamb(LAMB, KerasRule):
    """LAMB as in `keras.optimizers.Lamb`: norms are taken after the decoupled decay.

    Its `weight_decay` is 0.
    """

    def measured(self, g, w, m, v):
        """Returns the direction of the step, and the decayed variable."""
        return super().measured(g, self.decayed(w), m, v)

    def corrected(self, moment, beta):
        """As Keras rounds it."""
        return moment / (1 - beta**self.step)

    def __call__(self, select, g, w, m, v, norms=None):
        m, v, d = self.advance(select, g, w, m, v)
        return select(self.decayed(w) - d * self.rate(norms), w), m, v


@dataclass(frozen=True)
class NovoGrad(Rule):
    """Momentum of gradients normalized layer by layer, as in `keras_lso.NovoGrad`.

    ```python
    v = |g|**2 if v == 0 else beta_2 * v + (1 - beta_2) * |g|**2
    d = g / sqrt(v + epsilon) + weight_decay * w
    d = (1 - beta_1) * d                                # grad_averaging=True
    m = beta_1 * m + d
    w = w - learning_rate * m
    ```
    """

    slots: ClassVar = ("momentum", "second_moment")
    has_norms: ClassVar = True
    measures_gradient_only: ClassVar = True
    uses_gradient_norms: ClassVar = True
    learning_rate: Any
    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float = 0.0
    grad_averaging: bool = False

    def measured(self, g, w, m, v):
        """Returns the gradient."""
        return (g,)

    @property
    def direction_weight(self):
        """The weight of a new direction in the momentum."""
        return 1 - self.beta_1 if self.grad_averaging else 1.0

    def normalize(self, g_norm, v):
        """Returns the new second moment, and what the gradient is multiplied by."""
        square = ops.square(g_norm)
        moved = self.beta_2 * v + (1 - self.beta_2) * square
        moved = ops.where(v == 0, square, moved)
        total = moved + self.epsilon
        factor = ops.where(total == 0, ops.zeros_like(total), 1 / ops.sqrt(total))
        # An inf would stay for ever, and the layer with it.
        return ops.where(moved < math.inf, moved, v), factor

    def __call__(self, select, g, w, m, v, norms=None):
        [g_norm] = norms
        new_v, factor = self.normalize(g_norm, v)
        d = g * factor
        if self.weight_decay:
            d = d + w * self.weight_decay
        m = select(m * self.beta_1 + d * self.direction_weight, m)
        return select(w - m * self.learning_rate, w), m, select(new_v, v)
