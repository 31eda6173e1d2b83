"""The functions of tensors that formulas call: `xp` in `rule.py`.

They are functions of `keras.ops`, and the moving average, which Keras's optimizers
spell out.
"""

from keras.ops import (  # noqa: F401
    abs,
    cast,
    expm1,
    maximum,
    minimum,
    ones_like,
    sign,
    sqrt,
    square,
    where,
)


def average(old, new, beta):
    """Returns the next moving average, `beta * old + (1 - beta) * new`.

    It rounds as in Keras. On PyTorch Keras rounds differently, and so does
    `torch/lists.py`.
    """
    return old + (new - old) * (1 - beta)
