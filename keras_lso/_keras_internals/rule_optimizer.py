"""What Keras calls by private names in an optimizer that steps by a rule."""

from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor
from keras_lso._keras_internals.distribution import (
    has_reduced_gradients,
    reduced_gradients,
)
from keras_lso._keras_internals.optimizers import (
    index_of,
    names_excluded_by,
    variables_of,
)
from keras_lso._keras_internals.variables import held_by, is_found


def use_weight_decay(self: Any, variable: keras.Variable) -> bool:
    """Whether a variable decays, by the constructor's arguments and Keras's rules."""
    # Keras searches the name of the argument, which on TensorFlow may be a
    # `tf.Variable`. This function searches the variable's own name on each backend.
    index, names = index_of(self, variable), names_excluded_by(self)
    variable = variables_of(self)[index]
    return (
        self._decayable[index]
        and keras.optimizers.Optimizer._use_weight_decay(self, variable)
        and not (names and is_found(names, variable.name))
    )


def update_variables(
    self: Any, grads: list, variables: list, learning_rate: Tensor
) -> None:
    """Updates the variables in one pass, or one by one where that is impossible."""
    # Keras's optimizers also take a bare `tf.Variable`.
    are_kerass = all(isinstance(v, keras.Variable) for v in variables)
    values = [held_by(v) for v in variables]
    tensors = backend.as_gradients(grads)
    tensors = backend.replicas.sharded_alike(tensors, variables, values)
    if not has_reduced_gradients():
        tensors = backend.replicas.reduce_gradients(tensors)
    step = tensors, variables, learning_rate
    if not (are_kerass and self._update_by_rule(*step)):
        with reduced_gradients(self):
            keras.optimizers.Optimizer._backend_update_step(self, *step)
