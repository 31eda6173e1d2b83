"""The update formulas of the optimizers that have a fused step.

A rule holds the coefficients of one step as scalars. It is called with plain
tensors, `rule(keep, gradient, variable, *slots)`, and returns the new values of
the variable and of its slots. The gradient is unscaled already.

`keep(new, old)` is `new` where the step is applied and `old` where it is skipped.
It stands around every new value as soon as there is one: what is computed from it
then never needs the old value as well, so that a compiler can update in place.

Each is Keras's own formula, in float32.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from keras import ops


@dataclass(frozen=True)
class SGD:
    """Gradient descent, as in `keras.optimizers.SGD`.

    ```python
    w = w - learning_rate * g
    ```
    """

    slots: ClassVar = ()
    learning_rate: Any

    def __call__(self, keep, g, w):
        return (keep(w - g * self.learning_rate, w),)


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
    learning_rate: Any
    momentum: Any
    nesterov: bool = False

    def __call__(self, keep, g, w, m):
        descent = g * self.learning_rate
        m = keep(m * self.momentum - descent, m)
        step = m * self.momentum - descent if self.nesterov else m
        return keep(w + step, w), m


@dataclass(frozen=True)
class Adam:
    """Adam, as in `keras.optimizers.Adam`.

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

    def __call__(self, keep, g, w, m, v):
        m = keep(m + (g - m) * (1 - self.beta_1), m)
        v = keep(v + (ops.square(g) - v) * (1 - self.beta_2), v)
        return keep(w - m * self.alpha / (ops.sqrt(v) + self.epsilon), w), m, v
