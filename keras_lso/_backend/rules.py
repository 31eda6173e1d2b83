"""The update formulas of the optimizers that have a fused step.

A rule holds the coefficients of one step as scalars. It is called with plain
tensors, `rule(select, gradient, variable, *slots, norms=norms)`, and returns the new
values of the variable and of its slots. The gradient is unscaled already.

Some rules take norms of whole tensors: those of what `measured(gradient, variable,
*slots)` returns, in that order (see `Framework.norms_of`).

`select(new, old)` is `new` where the step is applied and `old` where it is skipped.
It is applied to every new value as soon as there is one: what is computed from it
then never needs the old value as well, so that a compiler can update in place.

The subclasses of `KerasRule` are Keras's own formulas, in float32.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from keras import ops


class Rule:
    """What is true of a rule unless it says otherwise.

    Attributes:
        slots: Tuple of the names of its slots.
        has_norms: Bool. Whether rules of this class take norms.
        measures_gradient_only: Bool. Whether the only norm is that of the gradient.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    has_norms: ClassVar = False
    measures_gradient_only: ClassVar = False

    @property
    def takes_norms(self):
        """Whether this rule takes norms, which may depend on its coefficients."""
        return self.has_norms


@dataclass(frozen=True)
class KerasRule(Rule):
    """A formula of Keras's, with its decoupled decay.

    `decay` is what Keras's optimizers call `weight_decay`, times the learning rate;
    None if there is none.

    ```python
    w = w - decay * w                                   # before the step
    ```
    """

    decay: Any = field(default=None, kw_only=True)

    def decayed(self, w):
        """Returns a variable after its decoupled decay."""
        return w if self.decay is None else w - w * self.decay


@dataclass(frozen=True)
class SGD(KerasRule):
    """Gradient descent, as in `keras.optimizers.SGD`.

    ```python
    w = w - learning_rate * g
    ```
    """

    learning_rate: Any

    def __call__(self, select, g, w, norms=None):
        return (select(self.decayed(w) - g * self.learning_rate, w),)


@dataclass(frozen=True)
class Momentum(KerasRule):
    """Gradient descent with momentum, as in `keras.optimizers.SGD`.

    ```python
    m = momentum * m - learning_rate * g
    w = w + m                                           # nesterov=False
    w = w + momentum * m - learning_rate * g            # nesterov=True
    ```
    """

    slots: ClassVar = ("momentum",)
    learning_rate: Any
    momentum: Any
    nesterov: bool = False

    def __call__(self, select, g, w, m, norms=None):
        descent = g * self.learning_rate
        m = select(m * self.momentum - descent, m)
        step = m * self.momentum - descent if self.nesterov else m
        return select(self.decayed(w) + step, w), m


@dataclass(frozen=True)
class Adam(KerasRule):
    """Adam, as in `keras.optimizers.Adam`, and with `decay` as in `AdamW`.

    ```python
    alpha = learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t)
    m = m + (1 - beta_1) * (g - m)
    v = v + (1 - beta_2) * (g**2 - v)
    w = w - alpha * m / (sqrt(v) + epsilon)
    ```
    """

    slots: ClassVar = ("momentum", "velocity")
    alpha: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any

    def __call__(self, select, g, w, m, v, norms=None):
        m = select(m + (g - m) * (1 - self.beta_1), m)
        v = select(v + (ops.square(g) - v) * (1 - self.beta_2), v)
        step = m * self.alpha / (ops.sqrt(v) + self.epsilon)
        return select(self.decayed(w) - step, w), m, v


@dataclass(frozen=True)
class Lion(KerasRule):
    """Steps of one length, as in `keras.optimizers.Lion`.

    ```python
    w = w - learning_rate * sign(beta_1 * m + (1 - beta_1) * g)
    m = beta_2 * m + (1 - beta_2) * g
    ```
    """

    slots: ClassVar = ("momentum",)
    learning_rate: Any
    beta_1: Any
    beta_2: Any

    def __call__(self, select, g, w, m, norms=None):
        # In float32 `1 - beta` is rounded: the sign is Keras's to the last bit.
        beta_1, beta_2 = (ops.cast(b, g.dtype) for b in (self.beta_1, self.beta_2))
        direction = ops.sign(m * beta_1 + g * (1 - beta_1))
        m = select(m * beta_2 + g * (1 - beta_2), m)
        return select(self.decayed(w) - direction * self.learning_rate, w), m


@dataclass(frozen=True)
class RMSprop(KerasRule):
    """As `keras.optimizers.RMSprop`, neither centered nor with momentum.

    ```python
    v = rho * v + (1 - rho) * g**2
    w = w - learning_rate * g / sqrt(v + epsilon)
    ```
    """

    slots: ClassVar = ("velocity",)
    learning_rate: Any
    rho: Any
    epsilon: Any

    def __call__(self, select, g, w, v, norms=None):
        v = select(v * self.rho + ops.square(g) * (1 - self.rho), v)
        step = g * self.learning_rate / ops.sqrt(v + self.epsilon)
        return select(self.decayed(w) - step, w), v


@dataclass(frozen=True)
class Adagrad(KerasRule):
    """As `keras.optimizers.Adagrad`.

    ```python
    v = v + g**2
    w = w - learning_rate * g / sqrt(v + epsilon)
    ```
    """

    slots: ClassVar = ("accumulator",)
    learning_rate: Any
    epsilon: Any

    def __call__(self, select, g, w, v, norms=None):
        v = select(v + ops.square(g), v)
        step = g * self.learning_rate / ops.sqrt(v + self.epsilon)
        return select(self.decayed(w) - step, w), v


@dataclass(frozen=True)
class TrustRatio:
    """How far a layer may move, relative to its norm.

    ```python
    ratio = eeta * |w| / (|d| + epsilon)                        # paper=False
    ratio = eeta * |w| / (|d| + weight_decay * |w| + epsilon)   # paper=True
    ratio = min(ratio, 1)                                       # clip=True
    ratio = 1 where |w| or |d| is 0
    ```
    """

    eeta: float
    epsilon: float = 0.0
    clip: bool = False
    paper: bool = False

    def quotient(self, d_norm, w_norm, weight_decay=0.0, learning_rate=None):
        """Returns the ratio without its limits, over the `learning_rate` if given."""
        denominator = d_norm + self.epsilon
        if self.paper:
            denominator = denominator + weight_decay * w_norm
        if learning_rate is not None:
            denominator = denominator * learning_rate
        return self.eeta * w_norm / denominator

    def __call__(self, d_norm, w_norm, weight_decay):
        ratio = self.quotient(d_norm, w_norm, weight_decay)
        # Not finite: 0 / 0, or a variable so large that its norm overflows.
        usable = (w_norm > 0) & (d_norm > 0) & (ratio < math.inf)
        one = ops.ones_like(ratio)
        ratio = ops.where(usable, ratio, one)
        return ops.minimum(ratio, one) if self.clip else ratio


@dataclass(frozen=True)
class LARS(Rule):
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
    has_norms: ClassVar = True
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

    @property
    def takes_norms(self):
        return self.trust_ratio is not None

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

    def rate(self, norms):
        """Returns the learning rate of a layer with these norms."""
        if self.trust_ratio is None:
            return self.learning_rate
        d_norm, w_norm = norms
        return self.learning_rate * self.trust_ratio(d_norm, w_norm, self.weight_decay)

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


def always(new, old):
    """The `select` of a step that is applied."""
    return new
