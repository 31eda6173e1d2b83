"""The names of types in signatures.

Neither Keras nor TensorFlow is typed. A type checker that reads no sources of theirs
takes what is theirs for `Any`; one that does, as Pyright, guesses.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import keras

# A `tf.Tensor`, a `jax.Array` or a `torch.Tensor`. Which of them it is depends on a
# variable of the environment, which no type checker knows.
Tensor: TypeAlias = Any

# A function that a decorator leaves the signature of.
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# A model of any class, where a function returns one of the same class.
ModelT = TypeVar("ModelT", bound=keras.Model)
