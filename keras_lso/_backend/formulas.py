"""The functions that formulas take, of tensors: `xp` in `rule.py`.

Those of `keras.ops`, and the average, which Keras writes in its optimizers.
"""

from keras.ops import (  # noqa: F401
    abs,
    cast,
    expm1,
    maximum,
    minimum,
    sign,
    sqrt,
    square,
    where,
    zeros_like,
)


def average(old, new, beta):
    """Returns the next moving average, `beta * old + (1 - beta) * new`.

    As Keras rounds it; on PyTorch Keras rounds it otherwise, and so does
    `torch/lists.py`.
    """
    return old + (new - old) * (1 - beta)
