"""Methods that `LossScaleOptimizer`, LARS, LAMB and NovoGrad add to Keras's.

A class assigns the methods that it has, `minimize = methods.minimize`. Methods that
only tf.keras 2 has are in `compat/tf_keras/methods.py`, which is imported when one of
them is looked up.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from numpy.typing import ArrayLike, NDArray

from keras_lso._backend import backend
from keras_lso._backend.types import Tensor
from keras_lso._core.gradients import check_some_gradient, split_pairs
from keras_lso._core.option_checks import check_operation_name, check_variables
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import chain_of, iteration_variable


class OfTFKeras:
    """A method or property of tf.keras 2, under the name that it is assigned to."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: Any) -> Any:
        module = importlib.import_module("keras_lso.compat.tf_keras.methods")
        return getattr(module, self._name).__get__(optimizer, owner)


def minimize(
    self: Any,
    loss: Tensor | Callable[[], Tensor],
    var_list: keras.Variable
    | Iterable[keras.Variable]
    | Callable[[], keras.Variable | Iterable[keras.Variable]],
    grad_loss: Tensor | None = None,
    name: str | None = None,
    tape: Any = None,
) -> keras.Variable:
    """Computes the gradients of a loss and applies them.

    Args:
        loss: Callable without arguments that returns the loss; or a tensor, on
            TensorFlow with `tape`, on PyTorch without. JAX cannot differentiate a
            tensor.
        var_list: The variables to update, or a callable that returns them. Use a
            callable if the first call of `loss` creates variables. (JAX then repeats
            that call.) A single variable counts as a list of one, as in tf.keras 2.
        grad_loss: Tensor of the loss's shape with the weights of its elements.
            Defaults to `None`: all weights are 1.
        name: Defaults to `None`. Keras 3 does not name operations.
        tape: The `tf.GradientTape` under which a tensor `loss`, or a part of the
            result of a callable, was computed. Defaults to `None`.

    Returns:
        The variable that counts the applied steps.

    Raises:
        ValueError: If `var_list` holds anything but variables, if no variable
            has a gradient, or if a tensor cannot be differentiated.
        RuntimeError: If called in a cross-replica context.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    >>> w = keras.Variable([3.0, 4.0])
    >>> _ = optimizer.minimize(lambda: keras.ops.sum(w * w) / 2, [w])
    >>> print(w.numpy())
    [1.5 2. ]
    """
    backend.check_replica_context("minimize")
    grads, variables = scaled_gradients(self, loss, var_list, grad_loss, tape)
    return self._apply_scaled(zip(grads, variables, strict=True), name)


def apply_gradients(
    self: Any,
    grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
    name: str | None = None,
    experimental_aggregate_gradients: bool = True,
    skip_gradients_aggregation: bool = False,
) -> keras.Variable:
    """Applies gradients to variables.

    Args:
        grads_and_vars: The `(gradient, variable)` pairs.
        name: Defaults to `None`. Keras 3 does not name operations.
        experimental_aggregate_gradients: See
            `keras_lso.LossScaleOptimizer.apply_gradients`. Defaults to `True`.
        skip_gradients_aggregation: See the same method. Defaults to `False`.

    Returns:
        The variable that counts the applied steps.

    Raises:
        TypeError: If `grads_and_vars` is malformed.
        ValueError: If no variable has a gradient.
        RuntimeError: If called in a cross-replica context.
    """
    are_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
    return apply_pairs(self, grads_and_vars, name, are_reduced)


@backend.as_written
def apply_pairs(optimizer, grads_and_vars, name, are_reduced, **kwargs):
    """Implements `apply_gradients`; `kwargs` are further arguments of `apply`."""
    check_operation_name(name)
    backend.check_replica_context("apply_gradients")
    grads, variables = split_pairs(grads_and_vars)
    check_some_gradient(optimizer, grads, variables)
    with reduced_gradients(optimizer, are_reduced):
        optimizer.apply(grads, variables, **kwargs)
    return iteration_variable(chain_of(optimizer)[-1])


def scaled_gradients(optimizer, loss, var_list, grad_loss=None, tape=None):
    """Returns the gradients of the scaled loss, and their variables."""

    def variables():
        given = var_list() if callable(var_list) else var_list
        return check_variables("var_list", given)

    scaled = optimizer._scaled
    if not callable(loss):
        trained = variables()
        grads = backend.differentiate(loss, trained, scaled, grad_loss, tape)
        return grads, trained
    # Before `build`, the first call of `loss` may create the variables.
    is_late = callable(var_list) and not optimizer.built
    trained = variables if is_late else variables()
    _, grads = backend.compute_gradients(
        lambda: scaled(loss()), trained, grad_loss, tape
    )
    return grads, trained() if callable(trained) else trained


if TYPE_CHECKING:

    class Signatures:
        """The methods above, and those of tf.keras, for type checkers.

        They do not see the methods that a class assigns from this module.
        """

        @property
        def weights(self) -> list[keras.Variable]: ...

        def minimize(
            self,
            loss: Tensor | Callable[[], Tensor],
            var_list: keras.Variable
            | Iterable[keras.Variable]
            | Callable[[], keras.Variable | Iterable[keras.Variable]],
            grad_loss: Tensor | None = None,
            name: str | None = None,
            tape: Any = None,
        ) -> keras.Variable: ...

        def apply_gradients(
            self,
            grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
            name: str | None = None,
            experimental_aggregate_gradients: bool = True,
            skip_gradients_aggregation: bool = False,
        ) -> keras.Variable: ...

        def get_gradients(
            self, loss: Tensor | Callable[[], Tensor], params: Iterable[keras.Variable]
        ) -> list[Tensor]: ...

        def get_updates(
            self, loss: Tensor | Callable[[], Tensor], params: Iterable[keras.Variable]
        ) -> list[keras.Variable]: ...

        def add_slot(
            self,
            var: keras.Variable,
            slot_name: str,
            initializer: str
            | dict[str, Any]
            | Callable[..., Any]
            | ArrayLike = "zeros",
            shape: Sequence[int] | None = None,
        ) -> keras.Variable: ...

        def get_slot(self, var: keras.Variable, slot_name: str) -> keras.Variable: ...

        def get_slot_names(self) -> list[str]: ...

        def add_weight(
            self,
            name: str,
            shape: Sequence[int],
            dtype: str | None = None,
            initializer: str | dict[str, Any] | Callable[..., Any] = "zeros",
            trainable: bool | None = None,
            synchronization: Any = "auto",
            aggregation: Any = "none",
        ) -> keras.Variable: ...

        def get_weights(self) -> list[NDArray[Any]]: ...

        def set_weights(self, weights: Iterable[ArrayLike]) -> None: ...
else:
    Signatures = object
