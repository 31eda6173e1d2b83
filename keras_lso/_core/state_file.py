"""The state of a `LossScaleOptimizer` in a file, in the layout of Keras's own class.

In this order, so that files go both ways:

- `iteration`: the attempted steps (the inner optimizer counts the applied ones), and
  `learning_rate`, which has no use;
- `step_counter` and `dynamic_scale`, of the loss-scale policy;
- the variables of the inner optimizer;
- what else the policy keeps, and the float32 master weights, if there are any.
"""

import warnings

import keras
import numpy as np
from keras import ops

from keras_lso._checks import check_state
from keras_lso._core.stored_state import read_stored
from keras_lso._keras_internals.optimizers import base_variables_of, variables_of
from keras_lso._keras_internals.unsaved import restore_unsaved, saved_by_keras


class StateFile:
    """Saves and loads the variables of an optimizer, all of them or none.

    Args:
        optimizer: The `LossScaleOptimizer`. It is asked for its variables each time:
            there are more of them once it is built.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def variables(self):
        """The variables that are saved, in the order of the file."""
        optimizer = self._optimizer
        return [
            *self._first_variables,
            *optimizer.inner_optimizer.variables,
            *optimizer.loss_scale_policy.variables[2:],
            *optimizer._master_variables,
        ]

    @property
    def _first_variables(self):
        """Those that Keras's class has as well, before the inner optimizer's."""
        optimizer = self._optimizer
        of_policy = optimizer.loss_scale_policy.variables
        return base_variables_of(optimizer) + of_policy[:2]

    def save(self, store):
        """Writes the state into a mapping of `"0"`, `"1"`, ... to arrays."""
        for i, variable in enumerate(self.variables):
            # Not by `numpy()`, which under OpenVINO reads constants only in Keras 3.12.
            store[str(i)] = np.array(ops.convert_to_numpy(variable))

    def load(self, store):
        """Reads the state; warns, as Keras does, if it is of another optimizer.

        Three layouts are known: our own, that of `keras.optimizers.LossScaleOptimizer`,
        and that of the bare inner optimizer, after which the scale starts afresh.
        """
        variables = self._variables_in(store)
        if variables is None:
            # What Keras does: a model may be loaded without its optimizer.
            warnings.warn(
                "Skipping variable loading for optimizer "
                f"'{self._optimizer.name}', because it has {len(self.variables)} "
                "variables whereas the saved optimizer has "
                f"{len(store.keys())} variables.{self._hint_at_other_layouts()}",
                stacklevel=3,
            )
            return
        mended = self._optimizer.loss_scale_policy.variables
        self.assign(variables, read_stored(variables, store, mended))
        restore_unsaved(self._optimizer.inner_optimizer, variables)

    def assign(self, variables, values):
        """Assigns values to some of the variables; the rest of the state starts afresh.

        Args:
            variables: List of variables.
            values: List of arrays.
        """
        values = [
            check_state(v, value) for v, value in zip(variables, values, strict=True)
        ]
        counters = self._optimizer._counters
        policy = self._optimizer.loss_scale_policy
        counters.reset()
        policy.reset()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        policy.restore()
        counters.restore()

    def _variables_in(self, store):
        """Returns the variables whose values are stored; None for another layout."""
        first, inner = self._first_variables, self._optimizer.inner_optimizer
        is_built = self._optimizer.built
        layouts = [
            self.variables,
            first + inner.variables,
            first + saved_by_keras(inner),
            inner.variables,
        ]
        if not is_built:
            # Keras's class makes the scale's variables in `build`, as ours once did.
            base = base_variables_of(self._optimizer)
            layouts.append(base + inner.variables)
        layouts = [v for v in layouts if len(v) == len(store.keys())]
        # Two may be of one length: around Adafactor Keras's class saves fewer of the
        # inner optimizer's variables, and as many more of its own.
        variables = max(layouts, key=lambda v: _count_fitting(v, store), default=None)
        # Before `build` a wrapper has so few that other files may have as many.
        if variables is None or is_built:
            return variables
        return variables if _count_fitting(variables, store) == len(variables) else None

    def _hint_at_other_layouts(self):
        if not self._optimizer.built:
            return " The optimizer has not been built yet."
        trained = variables_of(self._optimizer)
        if any(v.dtype == "float16" for v in trained):
            return (
                " The weights are float16: an optimizer with float32 masters of them "
                "(`master_weights`) and one without have not the same state."
            )
        return ""


def _count_fitting(variables, store):
    """Returns for how many of the variables there is an entry of their kind."""
    names = set(store.keys())
    return sum(
        str(i) in names and _fits(variable, store[str(i)])
        for i, variable in enumerate(variables)
    )


def _fits(variable, stored):
    """Whether what is stored has the variable's shape, and counts if that does."""
    if not hasattr(stored, "dtype"):
        stored = np.asarray(stored)
    is_count = "int" in keras.backend.standardize_dtype(variable.dtype)
    has_shape = stored.shape == tuple(variable.shape)
    return has_shape and (stored.dtype.kind in "iu") == is_count
