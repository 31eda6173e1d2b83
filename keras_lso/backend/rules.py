"""The update formulas of the optimizers that have a fused step.

A rule holds the coefficients of one step as scalars. It is called with plain
tensors, `rule(keep, gradient, variable, *slots)`, and returns the new values of
the variable and of its slots. The gradient is unscaled already.

A rule whose `has_norms` is True looks at whole tensors as well: `norms(gradient,
variable, *slots)` returns the norms that the step needs, and the step takes them
as `norms=` from whoever has measured them already. If they are the norm of the
gradient and nothing else, `measures_gradient_only` is True.

`keep(new, old)` is `new` where the step is applied and `old` where it is skipped.
It stands around every new value as soon as there is one: what is computed from it
then never needs the old value as well, so that a compiler can update in place.

SGD, Momentum and Adam are Keras's own formulas, in float32. Their `decay` is what
Keras's optimizers call `weight_decay`, times the learning rate; None if there is none:

```python
w = w - decay * w                                   # before the step
```
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from keras import ops

from keras_lso.backend.shards import sum_over_shards


@dataclass(frozen=True)
class SGD:
    """Gradient descent, as in `keras.optimizers.SGD`.

    ```python
    w = w - learning_rate * g
    ```
    """

    slots: ClassVar = ()
    has_norms: ClassVar = False
    measures_gradient_only: ClassVar = False
    learning_rate: Any
    decay: Any = None

    def __call__(self, keep, g, w):
        return (keep(decayed(w, self.decay) - g * self.learning_rate, w),)


@dataclass(frozen=True)
class Momentum:
    """Gradient descent with momentum, as in `keras.optimizers.SGD`.

    ```python
    m = momentum * m - learning_rate * g
    w = w + m                                           # nesterov=False
    w = w + momentum * m - learning_rate * g            # nesterov=True
    ```
    """

    slots: ClassVar = ("momentum",)
    has_norms: ClassVar = False
    measures_gradient_only: ClassVar = False
    learning_rate: Any
    momentum: Any
    nesterov: bool = False
    decay: Any = None

    def __call__(self, keep, g, w, m):
        descent = g * self.learning_rate
        m = keep(m * self.momentum - descent, m)
        step = m * self.momentum - descent if self.nesterov else m
        return keep(decayed(w, self.decay) + step, w), m


@dataclass(frozen=True)
class Adam:
    """Adam, as in `keras.optimizers.Adam`, and with `decay` as in `AdamW`.

    ```python
    alpha = learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t)
    m = m + (1 - beta_1) * (g - m)
    v = v + (1 - beta_2) * (g**2 - v)
    w = w - alpha * m / (sqrt(v) + epsilon)
    ```
    """

    slots: ClassVar = ("momentum", "velocity")
    has_norms: ClassVar = False
    measures_gradient_only: ClassVar = False
    alpha: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any
    decay: Any = None

    def __call__(self, keep, g, w, m, v):
        m = keep(m + (g - m) * (1 - self.beta_1), m)
        v = keep(v + (ops.square(g) - v) * (1 - self.beta_2), v)
        step = m * self.alpha / (ops.sqrt(v) + self.epsilon)
        return keep(decayed(w, self.decay) - step, w), m, v


@dataclass(frozen=True)
class TrustRatio:
    """How far a layer may move, as a share of its size.

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

    def __call__(self, d_norm, w_norm, weight_decay):
        denominator = d_norm + self.epsilon
        if self.paper:
            denominator = denominator + weight_decay * w_norm
        ratio = self.eeta * w_norm / denominator
        # Not finite: 0 / 0, or a variable so large that its norm overflows.
        usable = (w_norm > 0) & (d_norm > 0) & (ratio < math.inf)
        one = ops.ones_like(ratio)
        ratio = ops.where(usable, ratio, one)
        return ops.minimum(ratio, one) if self.clip else ratio


@dataclass(frozen=True)
class LARS:
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
    measures_gradient_only: ClassVar = False
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

    def norms(self, g, w, v):
        """Returns the norms of the direction and of the variable, or None.

        An inf or a NaN in the gradient is one in the first of them.
        """
        if self.trust_ratio is None:
            return None
        return l2_norm(self.direction(g, w, v)), l2_norm(w)

    def direction(self, g, w, v):
        """Returns what the trust ratio is taken of."""
        if self.is_paper:
            return g
        d = self.decayed(g, w)
        return d if self.classic_momentum else self.advance(_always, d, v)[1]

    def decayed(self, g, w):
        """Returns the gradient of the loss with its L2 penalty."""
        return g + w * self.weight_decay if self.weight_decay else g

    def advance(self, keep, d, v):
        """Returns the new momentum, and the update that goes with it."""
        v = keep(v * self.momentum + d, v)
        return v, (v * self.momentum + d if self.nesterov else v)

    def rate(self, norms):
        """Returns the learning rate of a layer with these norms."""
        if self.trust_ratio is None:
            return self.learning_rate
        d_norm, w_norm = norms
        return self.learning_rate * self.trust_ratio(d_norm, w_norm, self.weight_decay)

    def __call__(self, keep, g, w, v, norms=None):
        rate = self.rate(norms or self.norms(g, w, v))
        d = self.decayed(g, w)
        if self.classic_momentum:
            v, update = self.advance(keep, d * rate, v)
        else:
            v, update = self.advance(keep, d, v)
            update = update * rate
        return keep(w - update, w), v


@dataclass(frozen=True)
class NovoGrad:
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

    def norms(self, g, w, m, v):
        """Returns the norm of the gradient, in a tuple."""
        return (l2_norm(g),)

    @property
    def share(self):
        """How much of a new direction enters the momentum."""
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

    def __call__(self, keep, g, w, m, v, norms=None):
        [g_norm] = norms or self.norms(g, w, m, v)
        new_v, factor = self.normalize(g_norm, v)
        d = g * factor
        if self.weight_decay:
            d = d + w * self.weight_decay
        m = keep(m * self.beta_1 + d * self.share, m)
        return keep(w - m * self.learning_rate, w), m, keep(new_v, v)


def decayed(w, decay):
    """Returns a variable after its decoupled decay."""
    return w if decay is None else w - w * decay


def l2_norm(values):
    """Returns the L2 norm of a tensor, summed up in the tensor's own dtype.

    Of the whole tensor, where each device holds a shard of it.
    """
    return ops.sqrt(sum_over_shards(ops.sum(ops.square(values))))


def _always(new, old):
    return new
