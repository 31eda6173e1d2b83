"""The state of a `LossScaleOptimizer` in a file, in the layout of Keras's own class.

In this order, so that files go both ways:

- `iteration`: the number of steps, skipped ones included, and `learning_rate`, which
  has no use. A `GuardedOptimizer`, which has no loss scale, says so there. In memory
  `iteration` is the number of skipped steps alone, since a user may assign the inner
  optimizer's count of applied ones;
- `step_counter` and `dynamic_scale`, of the loss-scale policy;
- the variables of the inner optimizer;
- what else the loss-scale policy keeps, and the float32 number of each weight that has
  a master, whatever the kind of masters;
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

# What an optimizer without a loss scale has as its own learning rate; others have 0.
_NO_SCALE = -1.0


class StateFile:
    """Saves and loads the variables of an optimizer, all of them or none.

    Args:
        optimizer: The `LossScaleOptimizer`. It is asked for its variables each time:
            there are more of them once it is built.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def _steps(self):
        """What a file has the number of steps for, skipped ones included."""
        return iteration_variable(self._optimizer)

    @property
    def _applied(self):
        return iteration_variable(self._optimizer.inner_optimizer)

    @property
    def variables(self):
        """The variables that are saved, in the order of the file."""
        masters = self._masters.numbers if self._masters else ()
        return [*self._variables_but_masters, *masters, *self._of_spikes]

    @property
    def in_memory(self):
        """The variables that the optimizer has: what it keeps in place of numbers."""
        masters = self._masters.variables if self._masters else ()
        return [*self._variables_but_masters, *masters, *self._of_spikes]

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
        """The ids of the variables of float32 numbers."""
        return set(map(id, self._masters.numbers if self._masters else ()))

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
        """Those that Keras's class has as well, before the inner optimizer's."""
        optimizer = self._optimizer
        of_policy = optimizer.loss_scale_policy.variables
        return base_variables_of(optimizer) + of_policy[:2]

    def save(self, store):
        """Writes the state into a mapping of `"0"`, `"1"`, ... to arrays."""
        numbers = self._numbers
        for i, variable in enumerate(self.variables):
            if id(variable) in numbers:
                variable = self._masters.saved(variable)
            # Not by `numpy()`, which under OpenVINO reads constants only in Keras 3.12.
            value = np.array(ops.convert_to_numpy(variable))
            if variable is self._steps:
                steps = value + np.int64(ops.convert_to_numpy(self._applied))
                value = np.minimum(steps, LARGEST_STEP).astype(value.dtype)
            store[str(i)] = value

    def load(self, store, is_as_in_memory=False):
        """Reads the state; warns, as Keras does, if it is of another optimizer.

        Three layouts are known: our own, that of `keras.optimizers.LossScaleOptimizer`,
        and that of the bare inner optimizer, after which the scale starts afresh.

        Args:
            store: Mapping of `"0"`, `"1"`, ... to arrays.
            is_as_in_memory: Bool. Whether `iteration` has the number of skipped steps,
                as somebody saves it who knows no `save`. Defaults to `False`.
        """
        variables = self._variables_in(store)
        if variables is None or not self._has_this_history(variables, store):
            # Perhaps of an optimizer with a spike guard, or with another window.
            without = _without_spikes(store)
            others = None if without is None else self._variables_in(without)
            if others is not None:
                variables, store = others, without
        if variables is None:
            # What Keras does: a model may be loaded without its optimizer.
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
        if self._optimizer._spikes is not None:
            self._optimizer._spikes.reset()
        # A number: on PyTorch an array would change with the variable.
        unused, own = self._unused, float(ops.convert_to_numpy(self._unused))
        numbers = self._numbers
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
        """Lets the loss scale of who loads this state start afresh."""
        self._unused.assign(_NO_SCALE)

    @property
    def _unused(self):
        """The optimizer's own learning rate."""
        return base_variables_of(self._optimizer)[1]

    def _variables_in(self, store):
        """Returns the variables whose values are stored; None for another layout."""
        first, inner = self._first_variables, self._optimizer.inner_optimizer
        is_built = self._optimizer.built
        all_variables = self.variables
        layouts = [
            all_variables,
            # Of an optimizer without a spike guard.
            all_variables[: len(all_variables) - len(self._of_spikes)],
            # Of who saves `optimizer.variables` by themselves.
            self.in_memory,
            # Of an optimizer without masters, as ours was of bfloat16 weights. They
            # restart where the weights differ.
            self._variables_but_masters,
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

    def _has_this_history(self, variables, store):
        """Whether the history of spikes in a store, if any, is one of this length."""
        history = self._of_spikes
        if not history or variables[-1] is not history[-1]:
            return True
        return _fits(history[0], store[str(len(variables) - len(history))])

    def _hint_at_other_layouts(self):
        if not self._optimizer.built:
            return " The optimizer has not been built yet."
        trained = variables_of(self._optimizer)
        if any(v.dtype in ("float16", "bfloat16") for v in trained):
            return (
                " The weights have 16 bits: an optimizer with float32 masters of them "
                "(`master_weights`) and one without have not the same state."
            )
        return ""


# The variables of a spike guard: see `SpikeHistory`.
_SPIKES = 2


def _without_spikes(store):
    """Returns a store without the last entries, None if they are of no spike guard."""
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


def _count_fitting(variables, store):
    """Returns for how many of the variables there is an entry of their kind."""
    names = set(store.keys())
    return sum(
        str(i) in names and _fits(variable, store[str(i)])
        for i, variable in enumerate(variables)
    )


def _fits(variable, stored):
    """Whether what is stored has the variable's shape, and is whole if that is."""
    if not hasattr(stored, "dtype"):
        stored = np.asarray(stored)
    is_whole = "int" in keras.backend.standardize_dtype(variable.dtype)
    has_shape = stored.shape == tuple(variable.shape)
    return has_shape and (stored.dtype.kind in "iu") == is_whole


# --- All of it fits, or none of it is taken -----------------------------------


def checked(optimizer, store):
    """Returns what Keras's `load_own_variables` may read; it assigns as it goes.

    Keras itself warns of a store with more or fewer entries, and assigns nothing.
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
        mended: Variables in which NaN and numbers that are too large do no harm,
            since they are mended afterwards.

    Returns:
        List of arrays of the variables' shapes and dtypes.

    Raises:
        ValueError, TypeError: If one is missing or does not fit its variable.
    """
    names = set(store.keys())
    missing = [str(i) for i in range(len(variables)) if str(i) not in names]
    if missing:
        raise ValueError(
            "The state of an optimizer is stored under the numbers of its variables, "
            f"'0' to '{len(variables) - 1}'. Not there: {missing}. The file is "
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
                    f"{error} The model alone is loaded by `load_model(path, "
                    "compile=False)` and `model.load_weights(path, "
                    "skip_mismatch=True)`. Nothing was assigned."
                ) from error
        values.append(value)
    return values


def check_is_sound(variable, stored, value):
    """Refuses NaN, and what is finite in the file but not in the variable's dtype.

    A slot or a learning rate that is NaN makes a weight NaN at the next step, though
    the gradients are finite. A slot may well be inf: Adam's second moment, say.

    Args:
        variable: The variable that the value is for.
        stored: Array, as it is in the file.
        value: Array, the same in the dtype of the variable.
    """
    target = f"The optimizer's variable '{variable.path}'"
    if np.isnan(value).any():
        raise ValueError(
            f"{target} must not be NaN, as the file has it: the run that wrote it had "
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
        target: String that says what it is for.
        value: Array, or what NumPy makes one of.
        shape: Tuple of integers, the shape that it has to have.
        dtype: String. Only whole numbers that it holds fit into an integer one.
        is_count: Bool. Whether no negative number fits. Defaults to `False`.
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
    # Of other integers only their owner, such as a loss-scale policy, knows which of
    # them it keeps.
    is_count = variable.name == "iteration"
    array = check_array(target, value, variable.shape, dtype, is_count)
    # Not every backend takes every array: PyTorch no big-endian one.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)
