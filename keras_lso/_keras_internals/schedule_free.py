"""The three points of schedule-free training: `x`, `y` and `z`.

Keras's `ScheduleFreeAdamW` holds `z`, to which gradients are applied, as its slots, and
`y`, at which gradients are taken, as the weights. It keeps no `x`, the average of the
`z` so far, which is what the training is for:

```python
y = (1 - beta_1) * z + beta_1 * x
```
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import (
    has_stepped,
    index_of,
    stepping,
    variables_of,
)


class Point(NamedTuple):
    """Where a variable is.

    Attributes:
        variable: What is trained. It holds `y`.
        z: Variable.
        beta_1: Float, the share of `x` in `y`.
    """

    variable: keras.Variable
    z: keras.Variable
    beta_1: float

    def average(self) -> Any:
        """Returns `x` of the `y` that the variable holds, a tensor.

        In float32 at least: a difference of two numbers that are close.
        """
        y, z = backend.in_float32(self.variable), backend.in_float32(self.z)
        x = (y - (1 - self.beta_1) * z) / self.beta_1
        return ops.cast(x, self.variable.dtype)


def schedule_free_in(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns those of the optimizers that step which are schedule-free, a list."""
    # Keras 3.12 has none.
    cls = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    return [o for o in stepping(optimizer) if cls is not None and isinstance(o, cls)]


def points_of(optimizer: keras.Optimizer) -> list[Point]:
    """Returns the `Point` of each variable that is trained schedule-free.

    None before the first step that is applied: there all three points are one.
    """
    return [
        Point(v, one._momentums[index_of(one, v)], float(one.beta_1))
        for one in schedule_free_in(optimizer)
        if one.built and has_stepped(one)
        for v in variables_of(one)
    ]
