"""Methods that `LossScaleOptimizer`, LARS, LAMB and NovoGrad add to Keras's.

Most exist only in tf.keras 2.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike, NDArray

from keras_lso._backend import backend
from keras_lso._backend.tensors import Grads, Tensor, Variables
from keras_lso._core.checks import check_operation_name
from keras_lso._core.gradients import (
    as_list,
    check_some_gradient,
    check_variables,
    split_pairs,
)
from keras_lso._core.state_file import check_array, check_state
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    add_variable,
    chain_of,
    index_of,
    is_known,
    iteration_variable,
)
from keras_lso._keras_internals.state import Slots, slots_of, weights_of
from keras_lso._keras_internals.variables import flat_path, register_tree_node


class Methods:
    """A base class for optimizers, with the methods that Keras 3 does not have."""

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
        """Applies a loss's gradients; returns the variable that counts applied steps.

        Args:
            loss: Callable without arguments that returns the loss; or a tensor, on
                TensorFlow with `tape`, on PyTorch without, on JAX never.
            var_list: The variables to update, or one variable, or a callable that
                returns them. Use a callable if the first call of `loss` creates
                variables. (JAX then repeats that call.)
            grad_loss: Weights of the loss's elements. Defaults to `None`: all are 1.
            name: Defaults to `None`. Keras 3 does not name operations.
            tape: The `tf.GradientTape` under which a tensor `loss`, or a part of the
                result of a callable, was computed. Defaults to `None`.

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
        backend.replicas.check_replica_context("minimize")
        grads, variables = scaled_gradients(self, loss, var_list, grad_loss, tape)
        return self._apply_scaled(zip(grads, variables, strict=True), name)

    def apply_gradients(
        self: Any,
        grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
    ) -> keras.Variable:
        """Applies gradients: see `keras_lso.LossScaleOptimizer.apply_gradients`."""
        are_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        return apply_pairs(self, grads_and_vars, name, are_reduced)

    def get_gradients(
        self: Any, loss: Tensor | Callable[[], Tensor], params: Iterable[keras.Variable]
    ) -> list[Tensor]:
        """Returns a list of gradients of a loss, unscaled, for `apply_gradients`.

        Args:
            loss: Callable without arguments that returns the loss. Or a tensor: on
                PyTorch, and on TensorFlow inside a `tf.function`.
            params: The variables.

        Raises:
            ValueError: If a variable has no gradient, or a tensor no derivative.
            RuntimeError: If called in a cross-replica context.
        """
        backend.replicas.check_replica_context("get_gradients")
        params = check_variables("params", params)
        grads, variables = scaled_gradients(self, loss, params)
        for grad, variable in zip(grads, variables, strict=True):
            if grad is None:
                raise ValueError(
                    f"Variable {variable.name} has `None` for gradient: `loss` does "
                    "not depend on it, or through an operation without a derivative, "
                    "such as `ops.argmax` or `ops.round`. Leave it out of `params`."
                )
        return self._unscaled(grads)

    def get_updates(
        self: Any, loss: Tensor | Callable[[], Tensor], params: Iterable[keras.Variable]
    ) -> list[keras.Variable]:
        """Steps as `minimize` does; returns a list of `apply_gradients`'s result."""
        params = check_variables("params", params)
        grads = self.get_gradients(loss, params)
        return [self.apply_gradients(zip(grads, params, strict=True))]

    def add_slot(
        self: Any,
        var: keras.Variable,
        slot_name: str,
        initializer: str | dict[str, Any] | Callable[..., Any] | ArrayLike = "zeros",
        shape: Sequence[int] | None = None,
    ) -> keras.Variable:
        """Returns the slot variable of `var`, and creates it if there is none.

        It has the dtype of `var`. It is saved with the optimizer's other variables, and
        loaded into an optimizer that has the same slot.

        Args:
            var: The variable that the slot belongs to.
            slot_name: The name of the slot.
            initializer: A name, a callable, or an array. Defaults to `"zeros"`.
            shape: Defaults to `None`: the shape of `var`.
        """
        slot = find_slot(self, var, slot_name)
        if slot is not None:
            return slot
        shape = tuple(var.shape if shape is None else shape)
        if not isinstance(initializer, str | dict) and not callable(initializer):
            value = ops.convert_to_numpy(initializer)
            value = check_array(f"The slot {slot_name!r}", value, shape)
            initializer = keras.initializers.Constant(value)
        slot = self.add_weight(
            f"{flat_path(var)}_{slot_name}", shape, var.dtype, initializer
        )
        # The reference to `var` keeps its `id` from being reused.
        _added_slots(self)[slot_name, id(var)] = var, slot
        return slot

    def get_slot(self: Any, var: keras.Variable, slot_name: str) -> keras.Variable:
        """Returns the slot variable of `var` with one of `get_slot_names()`.

        Raises:
            KeyError: If there is no such slot.
        """
        slot = find_slot(self, var, slot_name)
        if slot is None:
            hint = "" if self.built else " The optimizer has not been built yet."
            raise KeyError(
                f"Variable {var.name} has no slot {slot_name!r}. The slots are "
                f"{self.get_slot_names()}.{hint}"
            )
        return slot

    def get_slot_names(self: Any) -> list[str]:
        """Returns the names of the slots in tf.keras, such as `["m", "v"]` for Adam."""
        added = [name for name, _ in _added_slots(self)]
        return list(dict.fromkeys([*_built_slots(self), *added]))

    def add_weight(
        self: Any,
        name: str,
        shape: Sequence[int],
        dtype: str | None = None,
        initializer: str | dict[str, Any] | Callable[..., Any] = "zeros",
        trainable: bool | None = None,
        synchronization: Any = "auto",
        aggregation: Any = "none",
    ) -> keras.Variable:
        """Adds a variable to the optimizer's state.

        Args:
            name: The name of the variable.
            shape: The shape of the variable.
            dtype: Defaults to `None`: `keras.config.floatx()`.
            initializer: A name, or a callable. Defaults to `"zeros"`.
            trainable: Defaults to `None`: `False`.
            synchronization: `"auto"`, `"none"`, `"on_write"`, `"on_read"`, or a
                `tf.VariableSynchronization`. Defaults to `"auto"`.
            aggregation: `"none"`, `"sum"`, `"mean"`, `"only_first_replica"`, or a
                `tf.VariableAggregation`. Defaults to `"none"`.
        """
        synchronization = _option(synchronization)
        if synchronization == "on_read" and trainable:
            raise ValueError(
                "Only variables that are not trainable take synchronization='on_read'. "
                f"Received: {trainable=}"
            )
        return add_variable(
            chain_of(self)[-1],
            name=name,
            shape=shape,
            dtype=dtype,
            initializer=keras.initializers.get(initializer),
            trainable=bool(trainable),
            synchronization=synchronization,
            aggregation=_option(aggregation),
        )

    @property
    def weights(self: Any) -> list[keras.Variable]:
        """The step count, then the slots in the order of tf.keras, and their scales."""
        chain = chain_of(self)
        masters = [o._masters for o in chain if hasattr(o, "_masters")]
        return weights_of(chain[-1]) + [s for m in masters for s in m.scales]

    def get_weights(self: Any) -> list[NDArray[Any]]:
        """Returns a list of arrays, the values of `weights`."""
        return [np.array(ops.convert_to_numpy(v)) for v in self.weights]

    def set_weights(self: Any, weights: Iterable[ArrayLike]) -> None:
        """Sets the state from a list of arrays.

        Args:
            weights: List of arrays, as `get_weights` returns it; this leaves the loss
                scale unchanged. Or the values of `variables`.

        Raises:
            ValueError: If the number of arrays or a shape differs. Nothing is assigned.
        """
        if not self.built:
            raise ValueError(
                "The optimizer has not yet been built: call "
                "`optimizer.build(trainable_variables)` before `set_weights`."
            )
        weights = as_list("weights", weights, "arrays")
        layouts = self._weight_layouts()
        variables = next((v for v in layouts if len(v) == len(weights)), None)
        if variables is None:
            raise ValueError(
                f"Argument `weights` must be a list of {len(layouts[0])} arrays, as "
                f"`get_weights` returns it, or of {len(layouts[1])}, in the order of "
                f"`optimizer.variables`. Received {len(weights)}."
            )
        self._assign_weights(variables, list(map(check_state, variables, weights)))

    def __dir__(self) -> list[str]:
        # TensorFlow's checkpoints recognise slots by this method, and refuse to save
        # the same slots twice.
        return [n for n in super().__dir__() if n != "get_slot_names"]

    # --- What an optimizer with a loss scale does otherwise -------------------

    def _scaled(self: Any, loss: Any) -> Any:
        return self.scale_loss(loss)

    def _unscaled(self, grads: list[Tensor]) -> list[Tensor]:
        # `apply` divides by `loss_scale_factor`.
        return grads

    def _apply_scaled(self: Any, grads_and_vars: Any, name: str | None) -> Any:
        return self.apply_gradients(grads_and_vars, name=name)

    def _weight_layouts(self: Any) -> list[list[keras.Variable]]:
        """Returns the lists of variables whose values `set_weights` takes."""
        return [self.weights, list(self.variables)]

    def _assign_weights(self, variables: Variables, values: list[NDArray[Any]]) -> None:
        """Assigns checked values to one of `_weight_layouts`."""
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


@backend.do_not_convert
def apply_pairs(
    optimizer: keras.Optimizer,
    grads_and_vars: Any,
    name: str | None,
    are_reduced: bool,
    **kwargs: Any,
) -> keras.Variable:
    """Implements `apply_gradients`; `kwargs` are further arguments of `apply`."""
    check_operation_name(name)
    backend.replicas.check_replica_context("apply_gradients")
    grads, variables = split_pairs(grads_and_vars)
    check_some_gradient(optimizer, grads, variables)
    with reduced_gradients(optimizer, are_reduced):
        optimizer.apply(grads, variables, **kwargs)
    return iteration_variable(chain_of(optimizer)[-1])


def scaled_gradients(
    optimizer: keras.Optimizer,
    loss: Any,
    var_list: Any,
    grad_loss: Tensor | None = None,
    tape: Any = None,
) -> tuple[Grads, Variables]:
    """Returns the gradients of the scaled loss, and their variables."""

    def variables() -> Variables:
        given = var_list() if callable(var_list) else var_list
        return check_variables("var_list", given)

    # Before `build`, the first call of `loss` may create the variables.
    is_late = callable(loss) and callable(var_list) and not optimizer.built
    trained = variables if is_late else variables()
    scaled = optimizer._scaled
    if callable(loss):
        _, grads = backend.host.compute_gradients(
            lambda: scaled(loss()), trained, grad_loss, tape
        )
    else:
        grads = backend.host.differentiate(loss, trained, scaled, grad_loss, tape)
    return grads, variables() if callable(trained) else trained


def find_slot(
    optimizer: keras.optimizers.Optimizer, var: keras.Variable, slot_name: str
) -> keras.Variable | None:
    """Returns the slot variable of `var`; None if there is none."""
    added = _added_slots(optimizer)
    if (slot_name, id(var)) in added:
        return added[slot_name, id(var)][1]
    slots = _built_slots(optimizer).get(slot_name)
    if slots is None or not is_known(optimizer, var):
        return None
    return slots[index_of(optimizer, var)]


def _built_slots(optimizer: keras.Optimizer) -> Slots:
    """Returns the slots that `build` made, none before."""
    if not optimizer.built:
        return {}
    return slots_of(chain_of(optimizer)[-1])


def _added_slots(
    optimizer: keras.Optimizer,
) -> dict[tuple[str, int], tuple[keras.Variable, keras.Variable]]:
    """Returns the slots of `add_slot`, with the variables that they belong to."""
    # An assignment to an attribute would make Keras track the slots twice.
    return optimizer.__dict__.setdefault("_slots_added_by_name", {})


def _option(value: Any) -> str:
    """Returns the name of an option of a variable, which TensorFlow has as an enum."""
    return "none" if value is None else str(getattr(value, "name", value)).lower()


# --- The type of `variables` ----------------------------------------------------------


@register_tree_node
class VariableList(list[keras.Variable]):
    """The variables of an optimizer, a callable list.

    In Keras 3 `optimizer.variables` is a list. In tf.keras `optimizer.variables()`
    returns the step count and the slots, but neither the learning rate nor the loss
    scale: code that sets them all to zero re-initialises the optimizer. A call of this
    list returns the result of `called`; without it, all variables.
    """

    def __init__(
        self,
        variables: Iterable[keras.Variable] = (),
        called: Callable[[], list[keras.Variable]] | None = None,
    ) -> None:
        super().__init__(variables)
        self._called = called

    def __call__(self) -> list[keras.Variable]:
        """Returns the variables that `variables()` of tf.keras returned."""
        return list(self if self._called is None else self._called())

    def __reduce__(self) -> Any:
        """Copies and pickles the variables without a reference to the optimizer."""
        positions = {id(v): i for i, v in enumerate(self)}
        return _from_positions, (
            list(self),
            [positions[id(v)] for v in self() if id(v) in positions],
        )

    # --- The protocol of `keras.tree`, with `optree` and with torch ---------------

    def tree_flatten(self) -> tuple[list[Any], None]:
        return list(self), None

    @classmethod
    def tree_unflatten(cls, metadata: Any, children: Any) -> Self:
        return cls(children)

    torchtree_flatten = tree_flatten

    @classmethod
    def torchtree_unflatten(cls, children: Any, metadata: Any) -> Self:
        return cls(children)


def _from_positions(variables: Variables, called: list[int]) -> "VariableList":
    """Returns a `VariableList` whose call returns the items at some positions."""
    return VariableList(variables, called=lambda: [variables[i] for i in called])


backend.host.register_list_class(VariableList)
