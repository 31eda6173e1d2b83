"""The functions of tensors that formulas call: `xp` in `rule.py`."""

from keras.ops import (  # noqa: F401
    abs,
    cast,
    maximum,
    minimum,
    ones_like,
    sign,
    sqrt,
    square,
    where,
)


def average(old, new, beta):
    """Returns the average `beta * old + (1 - beta) * new`, rounded as in Keras."""
    # On PyTorch Keras rounds differently, and so does `torch/lists.py`.
    return old + (new - old) * (1 - beta)
