"""The names of types in signatures."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import keras

# A `tf.Tensor`, a `jax.Array` or a `torch.Tensor`. The choice depends on an environment
# variable, which no type checker knows.
Tensor: TypeAlias = Any

# A function whose signature a decorator keeps.
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# A model of any class, for functions that return a model of the same class.
ModelT = TypeVar("ModelT", bound=keras.Model)
