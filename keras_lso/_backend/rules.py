"""The update formulas of the optimizers that have a fused step.

A rule holds the coefficients of one step as scalars. It is called with plain
tensors, `rule(select, gradient, variable, *slots, norms=norms)`, and returns the new
values of the variable and of its slots. The gradient is unscaled already.

Some rules take norms of whole tensors: those of what `measured(gradient, variable,
*slots)` returns, in that order (see `Framework.norms_of`).

`select(new, old)` is `new` where the step is applied and `old` where it is skipped.
It is applied to every new value as soon as there is one: what is computed from it
then never needs the old value as well, so that a compiler can update in place.

The subclasses of `KerasRule` are Keras's own formulas, in float32. The formulas that
treat each layer by its norm are in `layer_rules.py`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from keras import ops


class Rule:
    """What is true of a rule unless it says otherwise.

    Attributes:
        slots: Tuple of the names of its slots.
        has_norms: Bool. Whether rules of this class take norms.
        measures_gradient_only: Bool. Whether the only norm is that of the gradient.
        uses_gradient_norms: Bool. Whether norms of the gradients spare the kernels of
            some such rules work.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    has_norms: ClassVar = False
    measures_gradient_only: ClassVar = False
    uses_gradient_norms: ClassVar = False

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
class Nadam(KerasRule):
    """Adam with Nesterov momentum, as in `keras.optimizers.Nadam`.

    With `u[t] = beta_1 * (1 - 0.5 * 0.96**t)`, and `p[t] = u[1] * ... * u[t]`:

    ```python
    m = m + (1 - beta_1) * (g - m)
    v = v + (1 - beta_2) * (g**2 - v)
    d = u[t + 1] * m / (1 - p[t + 1]) + (1 - u[t]) * g / (1 - p[t])
    w = w - learning_rate * d / (sqrt(v / (1 - beta_2**t)) + epsilon)
    ```

    `momentum` is `u[t]`, `next_momentum` is `u[t + 1]`, and `product` is `p[t]`.
    """

    slots: ClassVar = ("momentum", "velocity")
    learning_rate: Any
    momentum: Any
    next_momentum: Any
    product: Any
    beta_2_power: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any

    @property
    def next_product(self):
        """`p[t + 1]`."""
        return self.product * self.next_momentum

    def __call__(self, select, g, w, m, v, norms=None):
        # As Keras has it. In float32 `1 - beta` is rounded.
        beta_1, beta_2 = (ops.cast(b, g.dtype) for b in (self.beta_1, self.beta_2))
        m = select(m + (g - m) * (1 - beta_1), m)
        v = select(v + (ops.square(g) - v) * (1 - beta_2), v)
        ahead = m * self.next_momentum / (1 - self.next_product)
        direction = ahead + g * (1 - self.momentum) / (1 - self.product)
        root = ops.sqrt(v / (1 - self.beta_2_power))
        step = direction * self.learning_rate / (root + self.epsilon)
        return select(self.decayed(w) - step, w), m, v


@dataclass(frozen=True)
class Adamax(KerasRule):
    """Adam with the largest magnitude, as in `keras.optimizers.Adamax`.

    ```python
    m = m + (1 - beta_1) * (g - m)
    u = max(beta_2 * u, |g|)
    w = w - learning_rate * m / ((1 - beta_1**t) * (u + epsilon))
    ```
    """

    slots: ClassVar = ("momentum", "largest")
    learning_rate: Any
    beta_1_power: Any
    beta_1: Any
    beta_2: Any
    epsilon: Any

    def __call__(self, select, g, w, m, u, norms=None):
        m = select(m + (g - m) * (1 - self.beta_1), m)
        u = select(ops.maximum(u * self.beta_2, ops.abs(g)), u)
        divisor = (u + self.epsilon) * (1 - self.beta_1_power)
        return select(self.decayed(w) - m * self.learning_rate / divisor, w), m, u


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


# --- Weights and their moving averages ----------------------------------------------


@dataclass(frozen=True)
class Average(Rule):
    """The moving average `w` of a variable `g`, as with `use_ema=True`.

    ```python
    w = momentum * w + (1 - momentum) * g
    ```
    """

    momentum: Any

    def __call__(self, select, g, w, norms=None):
        return (select(w * self.momentum + g * (1 - self.momentum), w),)


@dataclass(frozen=True)
class Overwrite(Rule):
    """A variable that becomes its average, as with `ema_overwrite_frequency`.

    ```python
    w = g
    ```
    """

    def __call__(self, select, g, w, norms=None):
        return (select(g, w),)


def always(new, old):
    """The `select` of a step that is applied."""
    return new
