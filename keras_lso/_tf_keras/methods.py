"""The methods of tf.keras 2 that optimizers do not have in Keras 3.

A mixin of the public classes. The optimizers in `_core/` do not depend on it.
"""

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.gradients import as_list, check_some_gradient, split_pairs
from keras_lso._core.state_file import check_array, check_state
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    add_variable,
    chain_of,
    index_of,
    is_known,
    iteration_variable,
)
from keras_lso._keras_internals.slots import slots_of, weights_of
from keras_lso._keras_internals.variables import flat_path
from keras_lso._option_checks import (
    check_operation_name,
    check_variable_option,
    check_variables,
)
from keras_lso._tf_keras.variable_list import VariableList

_AGGREGATIONS = ("none", "sum", "mean", "only_first_replica")
_SYNCHRONIZATIONS = ("auto", "none", "on_write", "on_read")


class TFKerasMethods(keras.optimizers.Optimizer):
    """The methods that code written for an optimizer of tf.keras 2 calls."""

    # --- Gradients ------------------------------------------------------------

    def minimize(self, loss, var_list, grad_loss=None, name=None, tape=None):
        """Computes the gradients of a loss and applies them.

        Args:
            loss: Callable without arguments that returns the loss. Or a tensor: on
                TensorFlow together with `tape`, on PyTorch without. JAX cannot
                differentiate a tensor.
            var_list: List or tuple of the variables to update, or callable that
                returns it. Use a callable if the first call of `loss` creates
                variables. (JAX then repeats that call.)
            grad_loss: Tensor of the loss's shape, by which its elements are
                weighted. Defaults to `None`: by 1.
            name: String. Defaults to `None`. Keras 3 does not name operations.
            tape: The `tf.GradientTape` under which a tensor `loss` was computed, or
                a part of what a callable returns. Defaults to `None`.

        Returns:
            The variable that counts the applied steps.

        Raises:
            ValueError: If `var_list` does not hold variables only, if no variable
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
        grads, variables = self._scaled_gradients(loss, var_list, grad_loss, tape)
        return self._apply_scaled(zip(grads, variables, strict=True), name)

    def apply_gradients(
        self,
        grads_and_vars,
        name=None,
        experimental_aggregate_gradients=True,
        skip_gradients_aggregation=False,
    ):
        """Applies gradients to variables.

        Args:
            grads_and_vars: List of `(gradient, variable)` pairs.
            name: String. Defaults to `None`. Keras 3 does not name operations.
            experimental_aggregate_gradients: See
                `keras_lso.LossScaleOptimizer.apply_gradients`. Defaults to `True`.
            skip_gradients_aggregation: See there. Defaults to `False`.

        Returns:
            The variable that counts the applied steps.

        Raises:
            TypeError: If `grads_and_vars` is malformed.
            ValueError: If no variable has a gradient.
            RuntimeError: If called in a cross-replica context.
        """
        are_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        return self._apply_pairs(grads_and_vars, name, are_reduced)

    @backend.as_written
    def _apply_pairs(self, grads_and_vars, name, are_reduced, **kwargs):
        check_operation_name(name)
        backend.check_replica_context("apply_gradients")
        grads, variables = split_pairs(grads_and_vars)
        check_some_gradient(self, grads, variables)
        with reduced_gradients(self, are_reduced):
            self.apply(grads, variables, **kwargs)
        return iteration_variable(chain_of(self)[-1])

    def get_gradients(self, loss, params):
        """Returns the gradients of a loss, for `apply_gradients`.

        Args:
            loss: Callable without arguments that returns the loss. Or a tensor: on
                PyTorch, and on TensorFlow inside of a `tf.function`.
            params: List of variables.

        Returns:
            List of gradients; those of a `LossScaleOptimizer` are unscaled.

        Raises:
            ValueError: If a variable has no gradient, or if a tensor cannot be
                differentiated.
            RuntimeError: If called in a cross-replica context.
        """
        backend.check_replica_context("get_gradients")
        params = check_variables("params", params)
        grads, variables = self._scaled_gradients(loss, params)
        for grad, variable in zip(grads, variables, strict=True):
            if grad is None:
                raise ValueError(
                    f"Variable {variable.name} has `None` for gradient: `loss` does "
                    "not depend on it. Leave it out of `params`, or make sure that "
                    "all operations in between can be differentiated (`ops.argmax` "
                    "and `ops.round` cannot)."
                )
        return self._unscaled(grads)

    def get_updates(self, loss, params):
        """Computes the gradients of a loss and applies them, as `minimize` does.

        Args:
            loss: See `get_gradients`.
            params: List of variables.

        Returns:
            List of one item, what `apply_gradients` returns.
        """
        grads = self.get_gradients(loss, params)
        variables = check_variables("params", params)
        return [self.apply_gradients(zip(grads, variables, strict=True))]

    def _scaled_gradients(self, loss, var_list, grad_loss=None, tape=None):
        """Returns the gradients of the scaled loss, and their variables."""

        def variables():
            given = var_list() if callable(var_list) else var_list
            return check_variables("var_list", given)

        if not callable(loss):
            trained = variables()
            grads = backend.differentiate(loss, trained, self._scaled, grad_loss, tape)
            return grads, trained
        # Before `build`, the first call of `loss` may create the variables.
        trained = variables if callable(var_list) and not self.built else variables()
        _, grads = backend.compute_gradients(
            lambda: self._scaled(loss()), trained, grad_loss, tape
        )
        return grads, trained() if callable(trained) else trained

    # --- Overridden by optimizers that scale the loss themselves --------------

    def _scaled(self, loss):
        return self.scale_loss(loss)

    def _unscaled(self, grads):
        # `apply` divides by `loss_scale_factor`.
        return grads

    def _apply_scaled(self, grads_and_vars, name):
        return self.apply_gradients(grads_and_vars, name=name)

    # --- Slots and weights ----------------------------------------------------

    def add_slot(self, var, slot_name, initializer="zeros", shape=None):
        """Returns the slot variable of that name, creating it if there is none.

        It is saved with the other variables of the optimizer, and loaded into an
        optimizer that has the same slot.

        Args:
            var: The variable that the slot belongs to.
            slot_name: String. The name of the slot.
            initializer: Name of an initializer, a callable, or an array with the
                initial value. Defaults to `"zeros"`.
            shape: Tuple of integers. Defaults to `None`: the shape of `var`.

        Returns:
            A variable of the dtype of `var`.
        """
        slot = self._find_slot(var, slot_name)
        if slot is not None:
            return slot
        shape = tuple(var.shape if shape is None else shape)
        if not isinstance(initializer, str | dict) and not callable(initializer):
            value = ops.convert_to_numpy(initializer)
            value = check_array(f"The slot {slot_name!r}", value, shape)
            initializer = keras.initializers.Constant(value)
        slot = self.add_weight(
            f"{flat_path(var)}_{slot_name}",
            shape,
            dtype=keras.backend.standardize_dtype(var.dtype),
            initializer=initializer,
        )
        # The reference to `var` keeps its `id` from being reused.
        self._added_slots.setdefault(slot_name, {})[id(var)] = var, slot
        return slot

    def get_slot(self, var, slot_name):
        """Returns the slot variable of `var`.

        Args:
            var: The variable that the slot belongs to.
            slot_name: String, one of `get_slot_names()`.

        Returns:
            A variable.

        Raises:
            KeyError: If there is no such slot.
        """
        slot = self._find_slot(var, slot_name)
        if slot is None:
            hint = "" if self.built else " The optimizer has not been built yet."
            raise KeyError(
                f"Variable {var.name} has no slot {slot_name!r}. The slots are "
                f"{self.get_slot_names()}.{hint}"
            )
        return slot

    def get_slot_names(self):
        """Returns the names of the slots, as tf.keras called them.

        Returns:
            List of strings, `["m", "v"]` for Adam. Empty before `build`.
        """
        return list(dict.fromkeys([*self._built_slots(), *self._added_slots]))

    def _find_slot(self, var, slot_name):
        added = self._added_slots.get(slot_name, {})
        if id(var) in added:
            return added[id(var)][1]
        slots = self._built_slots().get(slot_name)
        if slots is None or not is_known(self, var):
            return None
        return slots[index_of(self, var)]

    def _built_slots(self):
        return slots_of(chain_of(self)[-1]) if self.built else {}

    @property
    def _added_slots(self):
        # An assignment to an attribute would make Keras track the slots twice.
        return self.__dict__.setdefault("_slots_added_by_name", {})

    def add_weight(
        self,
        name,
        shape,
        dtype=None,
        initializer="zeros",
        trainable=None,
        synchronization="auto",
        aggregation="none",
    ):
        """Adds a variable to the optimizer's state.

        Args:
            name: String. The name of the variable.
            shape: Tuple of integers.
            dtype: String. Defaults to `None`: `keras.config.floatx()`.
            initializer: Name of an initializer, or a callable. Defaults to
                `"zeros"`.
            trainable: Bool. Defaults to `None`: `False`.
            synchronization: `"auto"`, `"none"`, `"on_write"`, `"on_read"`, or a
                `tf.VariableSynchronization`. Defaults to `"auto"`.
            aggregation: `"none"`, `"sum"`, `"mean"`, `"only_first_replica"`, or a
                `tf.VariableAggregation`. Defaults to `"none"`.

        Returns:
            A variable.
        """
        synchronization = check_variable_option(
            "synchronization", synchronization, _SYNCHRONIZATIONS
        )
        aggregation = check_variable_option("aggregation", aggregation, _AGGREGATIONS)
        if synchronization == "on_read" and trainable:
            raise ValueError(
                "Synchronization value can be set to 'on_read' only for non-trainable "
                "variables. Received: trainable=True, synchronization='on_read'"
            )
        return add_variable(
            chain_of(self)[-1],
            name=name,
            shape=shape,
            dtype=dtype,
            initializer=keras.initializers.get(initializer),
            trainable=bool(trainable),
            synchronization=synchronization,
            aggregation=aggregation,
        )

    def __dir__(self):
        """Hides `get_slot_names`, by which TensorFlow's checkpoints recognise slots.

        They refuse to save the same slots twice.
        """
        return [n for n in super().__dir__() if n != "get_slot_names"]

    @property
    def variables(self):
        """The variables: a list, as in Keras 3, but callable, as in tf.keras."""
        return VariableList(super().variables, called=self._called_variables)

    def _called_variables(self):
        return self.weights

    @property
    def weights(self):
        """The step count, then the slots in the order of tf.keras."""
        return weights_of(chain_of(self)[-1])

    def get_weights(self):
        """Returns the values of `weights`.

        Returns:
            List of arrays: the number of steps, then the slots.
        """
        return [np.array(ops.convert_to_numpy(v)) for v in self.weights]

    def set_weights(self, weights):
        """Sets the state from a list of arrays.

        Args:
            weights: List of arrays, as `get_weights` returns it, which leaves the
                loss scale unchanged. Or the values of `variables`.

        Raises:
            ValueError: If the number of arrays or a shape differs. Nothing is
                assigned then.
        """
        if not self.built:
            raise ValueError(
                "You are calling `set_weights()` on an optimizer that has not yet "
                "been built. Please call `optimizer.build(trainable_variables)` "
                "first."
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
        values = [
            check_state(v, value) for v, value in zip(variables, weights, strict=True)
        ]
        self._assign_weights(variables, values)

    def _weight_layouts(self):
        """Returns the lists of variables whose values `set_weights` takes."""
        return [self.weights, list(self.variables)]

    def _assign_weights(self, variables, values):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
