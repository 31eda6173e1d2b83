"""The state of a `LossScaleOptimizer` in a file, in the layout of Keras's own class.

The order is as follows, so that each class can read the other's files:

- `iteration`: the number of steps, including skipped ones, and `learning_rate`, which
  is unused, except that a `GuardedOptimizer` marks there that it has no loss scale. In
  memory, `iteration` is only the number of skipped steps, since a user may assign the
  inner optimizer's count of applied steps;
- `step_counter` and `dynamic_scale`, of the loss-scale policy;
- the variables of the inner optimizer;
- the other variables of the loss-scale policy, and the float32 number of each weight
  that has a master, whatever the kind of masters;
- the history of a spike guard, if there is one.
"""

import keras
import numpy as np
from keras import ops

from keras_lso._core.checks import LARGEST_STEP, warn
from keras_lso._keras_internals.optimizers import (
    base_variables_of,
    iteration_variable,
    variables_of,
)
from keras_lso._keras_internals.unsaved import restore_unsaved, saved_by_keras

# The learning rate of an optimizer without a loss scale. Others have 0.
_NO_SCALE = -1.0


class StateFile:
    """Saves and loads the variables of an optimizer, all of them or none.

    Args:
        optimizer: The `LossScaleOptimizer`. Its variables are looked up each time,
            since `build` adds some.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def _steps(self):
        """The variable whose entry in a file is the number of all steps."""
        return iteration_variable(self._optimizer)

    @property
    def _applied(self):
        return iteration_variable(self._optimizer.inner_optimizer)

    @property
    def variables(self):
        """The variables that are saved, in the order of the file."""
        return self._variables_but_masters + self._numbers + self._of_spikes

    @property
    def in_memory(self):
        """The variables in memory, with the kept variables instead of the numbers."""
        return self._variables_but_masters + self._kept + self._of_spikes

    @property
    def _of_spikes(self):
        spikes = self._optimizer._spikes
        return [] if spikes is None else spikes.variables

    @property
    def _masters(self):
        """The optimizer's `MasterWeights`, None before it is built."""
        return self._optimizer._masters if self._optimizer.built else None

    @property
    def _numbers(self):
        """The variables of the masters' float32 numbers."""
        return list(self._masters.numbers) if self._masters else []

    @property
    def _kept(self):
        """The variables that the masters keep in memory."""
        return list(self._masters.variables) if self._masters else []

    @property
    def _variables_but_masters(self):
        optimizer = self._optimizer
        return [
            *self._first_variables,
            *optimizer.inner_optimizer.variables,
            *optimizer.loss_scale_policy.variables[2:],
        ]

    @property
    def _first_variables(self):
        """The variables that Keras's class also has, before the inner optimizer's."""
        optimizer = self._optimizer
        of_policy = optimizer.loss_scale_policy.variables
        return base_variables_of(optimizer) + of_policy[:2]

    def save(self, store):
        """Writes the state into a mapping of `"0"`, `"1"`, ... to arrays."""
        numbers = set(map(id, self._numbers))
        for i, variable in enumerate(self.variables):
            if id(variable) in numbers:
                variable = self._masters.saved(variable)
            # Not with `numpy()`: under OpenVINO it reads only constants in Keras 3.12.
            value = np.array(ops.convert_to_numpy(variable))
            if variable is self._steps:
                steps = value + np.int64(ops.convert_to_numpy(self._applied))
                value = np.minimum(steps, LARGEST_STEP).astype(value.dtype)
            store[str(i)] = value

    def load(self, store, is_as_in_memory=False):
        """Reads the state; warns, as Keras does, if it is from another optimizer.

        Three layouts are known: our own, that of `keras.optimizers.LossScaleOptimizer`,
        and that of the bare inner optimizer, after which the scale starts over.

        Args:
            store: Mapping of `"0"`, `"1"`, ... to arrays.
            is_as_in_memory: Bool. Whether `iteration` has the number of skipped steps,
                as in a state that was saved without `save`. Defaults to `False`.
        """
        variables, store = self._variables_in(store)
        if variables is None:
            # Warn, as Keras does: a model may be loaded without its optimizer.
            warn(
                "Skipping variable loading for optimizer "
                f"'{self._optimizer.name}', because it has {len(self.variables)} "
                "variables whereas the saved optimizer has "
                f"{len(store.keys())} variables.{self._hint_at_other_layouts()}"
            )
            return
        mended = self._optimizer.loss_scale_policy.variables
        values = read_stored(variables, store, mended)
        stored = {id(v): value for v, value in zip(variables, values, strict=True)}
        if id(self._steps) in stored and not is_as_in_memory:
            # Keras's class leaves the number of steps at 0.
            skipped = stored[id(self._steps)] - stored[id(self._applied)]
            values[0] = np.maximum(skipped, 0)
        self.assign(variables, values)
        restore_unsaved(self._optimizer.inner_optimizer, variables)

    def assign(self, variables, values):
        """Assigns values to some of the variables, and resets the rest of the state.

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
        if self._optimizer._spikes is not None:
            self._optimizer._spikes.reset()
        # A Python number: on PyTorch an array would change with the variable.
        unused, own = self._unused, float(ops.convert_to_numpy(self._unused))
        numbers = set(map(id, self._numbers))
        if not numbers.intersection(map(id, variables)) and self._masters:
            self._masters.restart()
        for variable, value in zip(variables, values, strict=True):
            if id(variable) in numbers:
                self._masters.load(variable, value)
            else:
                variable.assign(value)
        if ops.convert_to_numpy(unused) == _NO_SCALE:
            policy.reset()
            unused.assign(own)
        elif own == _NO_SCALE:
            unused.assign(own)
        policy.restore()

    def say_that_there_is_no_scale(self):
        """Marks the state so that an optimizer that loads it starts a new scale."""
        self._unused.assign(_NO_SCALE)

    @property
    def _unused(self):
        """The optimizer's own learning rate."""
        return base_variables_of(self._optimizer)[1]

    def _variables_in(self, store):
        """Returns the variables whose values are stored, and the store with only these.

        The variables are None for another layout.
        """
        layouts = self._layouts
        found = [(variables, store) for variables in layouts]
        without = _without_spikes(store)
        if without is not None:
            # From an optimizer with a spike guard, or with a guard of another window.
            history = self._of_spikes
            whole = [(v + history, store) for v in layouts[:_WITH_SPIKES] if history]
            found = whole + found + [(variables, without) for variables in layouts]
        found = [(v, stored) for v, stored in found if len(v) == len(stored.keys())]
        # Two layouts may have the same length: around Adafactor, Keras's class saves
        # fewer of the inner optimizer's variables, and as many more of its own.
        fewest = min(found, key=lambda each: _misfits(*each), default=(None, store))
        # Before `build` a wrapper has so few variables that other files may match.
        if found and not self._optimizer.built and _misfits(*fewest):
            return None, store
        return fewest

    @property
    def _layouts(self):
        """The lists of variables that a file may have, without a spike guard's."""
        first, inner = self._first_variables, self._optimizer.inner_optimizer
        but_masters = self._variables_but_masters
        layouts = [
            but_masters + self._numbers,
            # From a user who saves `optimizer.variables` directly.
            but_masters + self._kept,
            # From an optimizer without masters. (This package's optimizer once had
            # none for bfloat16 weights.) The masters restart where the weights differ.
            but_masters,
            first + inner.variables,
            first + saved_by_keras(inner),
            inner.variables,
        ]
        if not self._optimizer.built:
            # Keras's class makes the scale's variables in `build`, as ours once did.
            layouts.append(base_variables_of(self._optimizer) + inner.variables)
        return layouts

    def _hint_at_other_layouts(self):
        if not self._optimizer.built:
            return " The optimizer has not been built yet."
        trained = variables_of(self._optimizer)
        if any(v.dtype in ("float16", "bfloat16") for v in trained):
            return (
                " The weights have 16 bits: an optimizer with float32 masters "
                "(`master_weights`) and one without do not have the same state."
            )
        return ""


# The variables of a spike guard: see `SpikeHistory`.
_SPIKES = 2
# The number of layouts, of the first ones, that a spike guard's variables may follow.
_WITH_SPIKES = 3


def _without_spikes(store):
    """Returns a store without a spike guard's entries; None if it has none."""
    names = set(store.keys())
    count = len(names) - _SPIKES
    if not {str(count), str(count + 1)} <= names:
        return None
    norms, counts = (np.asarray(store[str(count + i)]) for i in range(_SPIKES))
    if (norms.ndim, norms.dtype.kind) != (1, "f"):
        return None
    if (counts.shape, counts.dtype.kind) != ((3,), "i"):
        return None
    return {str(i): store[str(i)] for i in range(count) if str(i) in names}


def _misfits(variables, store):
    """Returns the number of variables that have no fitting entry."""
    names = set(store.keys())
    return sum(
        str(i) not in names or not _fits(variable, store[str(i)])
        for i, variable in enumerate(variables)
    )


def _fits(variable, stored):
    """Whether an entry has the variable's shape, and is an integer if that is."""
    if not hasattr(stored, "dtype"):
        stored = np.asarray(stored)
    is_whole = "int" in keras.backend.standardize_dtype(variable.dtype)
    has_shape = stored.shape == tuple(variable.shape)
    return has_shape and (stored.dtype.kind in "iu") == is_whole


# --- Checks, so that all of the state is loaded or nothing --------------------


def checked(optimizer, store):
    """Returns a checked store for Keras's `load_own_variables`.

    Keras assigns one variable after the other. It warns of a store with more or fewer
    entries, and assigns nothing.
    """
    variables = list(optimizer.variables)
    if len(store.keys()) != len(variables):
        return store
    return {str(i): value for i, value in enumerate(read_stored(variables, store))}


def read_stored(variables, store, mended=()):
    """Returns the arrays that a store holds for the variables of an optimizer.

    Args:
        variables: List of variables, as many as the store has entries.
        store: Mapping of `"0"`, `"1"`, ... to arrays, as Keras's stores are.
        mended: Variables in which NaN and numbers that are too large do no harm, since
            they are repaired afterwards.

    Returns:
        List of arrays of the variables' shapes and dtypes.

    Raises:
        ValueError, TypeError: If an array is missing or does not fit its variable.
    """
    names = set(store.keys())
    missing = [str(i) for i in range(len(variables)) if str(i) not in names]
    if missing:
        raise ValueError(
            "The state of an optimizer is stored under the numbers of its variables, "
            f"'0' to '{len(variables) - 1}'. Missing: {missing}. The file is "
            "damaged. Nothing was assigned."
        )
    mended = {id(v) for v in mended}
    values = []
    for i, variable in enumerate(variables):
        stored = np.asarray(store[str(i)])
        value = check_state(variable, stored)
        if id(variable) not in mended:
            try:
                check_is_sound(variable, stored, value)
            except ValueError as error:
                raise ValueError(
                    f"{error} To load only the model, write `load_model(path, "
                    "compile=False)` or `model.load_weights(path, "
                    "skip_mismatch=True)`. Nothing was assigned."
                ) from error
        values.append(value)
    return values


def check_is_sound(variable, stored, value):
    """Raises an error for NaN, and for numbers that overflow in the variable's dtype.

    A slot or a learning rate that is NaN makes a weight NaN at the next step, although
    the gradients are finite. A slot may be inf, such as Adam's second moment.

    Args:
        variable: The variable for the value.
        stored: Array from the file.
        value: The same array in the dtype of the variable.
    """
    target = f"The optimizer's variable '{variable.path}'"
    if np.isnan(value).any():
        raise ValueError(
            f"{target} must not be NaN, but is in the file: the run that wrote it had "
            "diverged, or the file is damaged. Load an earlier file."
        )
    infinite = np.isinf(value)
    if infinite.any() and (
        variable.name == "learning_rate" or not np.isinf(stored[infinite]).all()
    ):
        raise ValueError(
            f"{target} must be finite in {value.dtype.name}. The file holds "
            f"{stored[infinite].reshape(-1)[0]!r}."
        )


def check_array(target, value, shape, dtype="float32", is_count=False):
    """Returns `value` as an array of numbers that fits into `target`.

    Args:
        target: String that names the target.
        value: Array, or an object that NumPy can convert to one.
        shape: Tuple of integers, the required shape.
        dtype: String. An integer dtype takes only whole numbers in its range.
        is_count: Bool. Whether to reject negative numbers. Defaults to `False`.
    """
    array = np.asarray(value)
    # Objects, strings, times, complex numbers; records, but not bfloat16.
    if array.dtype.kind in "OSUMmc" or array.dtype.type is np.void:
        raise TypeError(
            f"{target} takes an array of numbers. Received one of dtype "
            f"{array.dtype}: {value!r}. Nothing was assigned."
        )
    if array.shape != tuple(shape):
        raise ValueError(
            f"{target} has shape {tuple(shape)}, but the array given for it has shape "
            f"{array.shape}. Nothing was assigned."
        )
    if "int" in dtype:
        lowest = 0 if is_count else np.iinfo(dtype).min
        highest = np.iinfo(dtype).max
        is_within = np.all(array >= lowest) and np.all(array <= highest)
        if not is_within or not np.array_equal(array, np.floor(array)):
            raise ValueError(
                f"{target} takes whole numbers from {lowest} to {highest}. "
                f"Received: {value!r}. Nothing was assigned."
            )
    return array


def check_state(variable, value):
    """Returns `value` as an array of the shape and dtype of an optimizer's variable."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    target = f"The optimizer's variable '{variable.path}'"
    # For other integers, only their owner, such as a loss-scale policy, knows the valid
    # range.
    is_count = variable.name == "iteration"
    array = check_array(target, value, variable.shape, dtype, is_count)
    # Not every backend takes every array: PyTorch takes no big-endian one.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)
