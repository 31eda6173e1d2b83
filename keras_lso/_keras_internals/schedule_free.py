"""The three points of schedule-free training: `x`, `y` and `z`.

Keras's `ScheduleFreeAdamW` applies gradients to `z`, which are its slots. It takes
gradients at `y`, which are the weights. It does not keep `x`, the average of the `z` so
far, which is the result of the training:

```python
y = (1 - beta_1) * z + beta_1 * x
```
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso._backend.tensors import in_float32
from keras_lso._keras_internals.optimizers import (
    has_stepped,
    index_of,
    stepping,
    variables_of,
)


class Point(NamedTuple):
    """A trained variable, which holds `y`, its `z`, and the share of `x` in `y`."""

    variable: keras.Variable
    z: keras.Variable
    beta_1: float

    def average(self) -> Any:
        """Returns `x`, computed from the `y` that the variable holds, a tensor."""
        # In float32 or wider, since it is a difference of close numbers.
        y, z = in_float32(self.variable), in_float32(self.z)
        x = (y - (1 - self.beta_1) * z) / self.beta_1
        return ops.cast(x, self.variable.dtype)


def schedule_free_in(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the schedule-free optimizers among those that step, a list."""
    # Keras 3.12 has no such class.
    cls = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    return [o for o in stepping(optimizer) if cls is not None and isinstance(o, cls)]


def points_of(optimizer: keras.Optimizer) -> list[Point]:
    """Returns the `Point` of each variable, none before the first applied step."""
    return [
        Point(v, one._momentums[index_of(one, v)], float(one.beta_1))
        for one in schedule_free_in(optimizer)
        if one.built and has_stepped(one)
        for v in variables_of(one)
    ]
