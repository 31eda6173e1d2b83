"""`get_regularization_loss`: the regularization penalties of a model's variables."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import keras
from keras import ops

from keras_lso._backend.tensors import Tensor
from keras_lso._keras_internals.variables import path_of

_model: ContextVar[keras.Model | None] = ContextVar("_model", default=None)


@contextlib.contextmanager
def model_at_hand(model: keras.Model | None) -> Iterator[None]:
    """Sets the model that `get_regularization_loss` defaults to."""
    token = _model.set(model)
    try:
        yield
    finally:
        _model.reset(token)


def get_regularization_loss(
    scope: str | keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    name: str = "total_regularization_loss",
) -> Tensor:
    """Returns the sum of all regularization losses, a float32 scalar; 0 without any.

    Each is computed from its variable in float32, where squares do not overflow.

    Args:
        scope: A Keras model or layer, or a list of them. Or, in the `loss` of an
            `optimize_loss(..., model=model)`, a string: the variables of that model
            whose paths start with it. Defaults to `None`: all of them.
        name: Defaults to `"total_regularization_loss"`. Keras 3 does not name tensors.

    Raises:
        ValueError: If `scope` is None or a string and there is no default model.

    Example:

    >>> import keras
    >>> from keras_lso.compat.open_seq2seq import get_regularization_loss
    >>> layer = keras.layers.Dense(
    ...     1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
    ... )
    >>> layer.build((None, 4))
    >>> print(keras.ops.convert_to_numpy(get_regularization_loss(layer)))
    2.0
    """
    prefix = ""
    if scope is None or isinstance(scope, str):
        scope, prefix = _model.get(), scope or ""
        if scope is None:
            raise ValueError(
                "There is no default model. Call `get_regularization_loss()` in the "
                "`loss` of an `optimize_loss(..., model=model)`, or pass the model: "
                "`get_regularization_loss(model)`."
            )
    layers = keras.tree.flatten(scope)
    variables = {id(v): v for layer in layers for v in layer.trainable_variables}
    penalties = [
        v.regularizer(ops.cast(v, "float32"))
        for v in variables.values()
        if v.regularizer is not None and path_of(v).startswith(prefix)
    ]
    if not penalties:
        return ops.zeros((), dtype="float32")
    return ops.sum(ops.stack([ops.cast(p, "float32") for p in penalties]))
