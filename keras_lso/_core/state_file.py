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

import itertools
from collections import Counter
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import LARGEST_STEP, warn
from keras_lso._core.master_weights import can_have_master
from keras_lso._keras_internals.optimizers import (
    base_variables_of,
    iteration_variable,
    steppers_of,
    variables_of,
)
from keras_lso._keras_internals.rates import rate_given_to
from keras_lso._keras_internals.slots import restore_unsaved, saved_by_keras

# The learning rate of an optimizer without a loss scale. Others have 0.
_NO_SCALE = -1.0


class StateFile:
    """Saves and loads the variables of an optimizer, all of them or none."""

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
        and that of the bare inner optimizer, after which the scale starts over. Each
        may have been written with a schedule in place of a constant learning rate, or
        the other way round: the optimizer then goes on with the rate that it was given.
        With `is_as_in_memory`, `iteration` has the number of skipped steps, as in a
        state that was saved without `save`.
        """
        layout = self._layout_of(store)
        if layout is None:
            # Warn, as Keras does: a model may be loaded without its optimizer.
            others = "other " * (len(store.keys()) == len(self.variables))
            warn(
                "Skipping variable loading for optimizer "
                f"'{self._optimizer.name}', because it has {len(self.variables)} "
                "variables whereas the saved optimizer has "
                f"{len(store.keys())} {others}variables.{self._difference_from(store)}"
            )
            return
        mended = self._optimizer.loss_scale_policy.variables
        variables, values = _read(layout, store, mended)
        stored = {id(v): value for v, value in zip(variables, values, strict=True)}
        if id(self._steps) in stored and not is_as_in_memory:
            # Keras's class leaves the number of steps at 0.
            skipped = stored[id(self._steps)] - stored[id(self._applied)]
            values[0] = np.maximum(skipped, 0)
        self.assign(variables, values)
        restore_unsaved(self._optimizer.inner_optimizer, variables)

    def assign(self, variables, values):
        """Assigns values to some of the variables, and resets the rest of the state."""
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

    def _layout_of(self, store):
        """Returns the variables of the first entries, None for another layout."""
        # An entry of None in the list is not read.
        lengths = self._lengths(store)
        rates = _rates_in(self._optimizer.inner_optimizer)
        alike = [layout for layout, length in lengths if len(layout) == length]
        others = [o for each in lengths for o in _with_other_rates(rates, *each)]
        if not alike and not others:
            return None
        # Two layouts may have the same length: around Adafactor, Keras's class saves
        # fewer of the inner optimizer's variables, and as many more of its own.
        kinds = _kinds_of(store)
        fitting = [v for v in alike + others if not _misfits(v, kinds)]
        by_keras = [v for v in fitting if isinstance(v, _ByKeras)]
        if by_keras and len(by_keras) < len(fitting):
            # All weights are scalars. Only Keras's class leaves the count of all steps
            # at 0. Before the first step moments are 0, and a rate is not.
            steps, applied, rate_or_moment = (store[name] for name in ("0", "4", "5"))
            is_by_keras = bool(steps < applied or applied == 0 < rate_or_moment)
            fitting = [v for v in fitting if isinstance(v, _ByKeras) == is_by_keras]
        # Before `build` a wrapper has so few variables that other files may match.
        if not fitting and alike and self._optimizer.built:
            return min(alike, key=lambda layout: _misfits(layout, kinds))
        return next(iter(fitting), None)

    def _lengths(self, store):
        """Returns the layouts, each with the number of entries that it would fill."""
        count, layouts = len(store.keys()), self._layouts
        if self._has_masters(store):
            # Slots have the same shapes.
            masters = set(map(id, self._numbers + self._kept))
            layouts = [v for v in layouts if not masters.isdisjoint(map(id, v))]
        lengths = [(layout, count) for layout in layouts]
        if not _ends_with_spikes(store):
            return lengths
        # From an optimizer with a spike guard, or with a guard of another window.
        history = self._of_spikes
        whole = [(v + history, count) for v in layouts[:_WITH_SPIKES] if history]
        return whole + lengths + [(layout, count - _SPIKES) for layout in layouts]

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
            inner.variables,
        ]
        by_keras = saved_by_keras(inner)
        if len(by_keras) < len(inner.variables):
            layouts.append(_ByKeras(first + by_keras))
        if not self._optimizer.built:
            # Keras's class makes the scale's variables in `build`, as ours once did.
            layouts.append(base_variables_of(self._optimizer) + inner.variables)
        return layouts

    def _difference_from(self, store):
        """Returns sentences on what the file and the optimizer do not share."""
        if not self._optimizer.built:
            return " The optimizer has not been built yet."
        if self._has_masters(store) and not self._masters.numbers:
            return (
                " The file has float32 masters of the weights, and an optimizer with "
                "`master_weights=False` has none."
            )
        own = Counter(tuple(v.shape) for v in self.variables)
        saved = Counter(shape for shape, _ in _kinds_of(store).values())
        parts = {"the file": saved - own, "the optimizer": own - saved}
        return "".join(
            f" Only in {place}: {_in_words(shapes)}."
            for place, shapes in parts.items()
            if shapes
        )

    def _has_masters(self, store):
        """Whether a state ends with the masters of the weights, apart from spikes."""
        # They are float32 numbers that round to the weights, which Keras loads first.
        narrow = list(filter(can_have_master, variables_of(self._optimizer)))
        end = len(store.keys()) - _SPIKES * _ends_with_spikes(store)
        pairs = [(str(end - i), v) for i, v in enumerate(reversed(narrow), start=1)]
        names = set(store.keys())
        return bool(pairs) and all(
            name in names and _may_be_master(np.asarray(store[name]), variable)
            for name, variable in pairs
        )


def _may_be_master(value, variable):
    """Whether a float32 array rounds to a 16-bit variable, up or down."""
    if value.dtype.name != "float32" or value.shape != tuple(variable.shape):
        return False
    weight = backend.to_host(ops.cast(variable, "float32"))
    # The units are those of bfloat16, and of the smallest float16.
    return np.allclose(value, weight, rtol=2.0**-7, atol=2.0**-24)


class _ByKeras(list):
    """The layout of Keras's class for an optimizer that it does not save whole."""


# The variables of a spike guard: see `SpikeHistory`.
_SPIKES = 2
# The number of layouts, of the first ones, that a spike guard's variables may follow.
_WITH_SPIKES = 3


def _ends_with_spikes(store):
    """Whether the last entries of a store are a spike guard's."""
    names = set(store.keys())
    last = [str(len(names) - _SPIKES + i) for i in range(_SPIKES)]
    if not names.issuperset(last):
        return False
    norms, counts = (np.asarray(store[name]) for name in last)
    are_norms = norms.ndim == 1 and norms.dtype.kind == "f"
    return are_norms and counts.shape == (3,) and counts.dtype.kind == "i"


def _in_words(shapes):
    """Returns how many arrays there are of each shape, for at most five shapes."""
    words = [f"{count} of shape {shape}" for shape, count in shapes.items()]
    if len(words) > 5:
        words = [*words[:4], f"{sum(shapes.values())} in all"]
    return ", ".join(words)


def _kind_of(variable):
    """Returns the kind of a variable, or of the rate that None stands for."""
    if variable is None:
        return (), False
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return tuple(variable.shape), "int" in dtype


def _kinds_of(store):
    """Returns a dict of the kinds of all entries. A store of Keras's reads the file."""
    names = store.keys()
    arrays = ((name, np.asarray(store[name])) for name in names)
    return {name: (array.shape, array.dtype.kind in "iu") for name, array in arrays}


def _misfits(variables, kinds):
    """Returns the number of variables that have no fitting entry."""
    return sum(kinds.get(str(i)) != _kind_of(v) for i, v in enumerate(variables))


# --- Constant learning rates and schedules --------------------------------------------

# If a `MultiOptimizer` has many members, not each subset of rates is tried.
_MOST_SUBSETS = 100


def _rates_in(optimizer):
    """Returns the learning rates, None if computed, by the `id`s of counts of steps."""
    steppers = steppers_of(optimizer)
    rates = {id(iteration_variable(o)): rate_given_to(o) for o in steppers}
    return {i: r if isinstance(r, keras.Variable) else None for i, r in rates.items()}


def _with_other_rates(rates, variables, count):
    """Yields layouts of a length with schedules in place of numbers, or the reverse."""
    # A variable of a rate that a schedule has replaced is None.
    own = {id(rate) for rate in rates.values() if rate is not None}
    rest = [v for v in variables if id(v) not in own]
    steps = [id(v) for v in rest if id(v) in rates]
    if count < len(rest):
        return
    subsets = itertools.combinations(steps, count - len(rest))
    for saved in itertools.islice(subsets, _MOST_SUBSETS):
        parts = ([v, rates[id(v)]] if id(v) in saved else [v] for v in rest)
        yield type(variables)(itertools.chain.from_iterable(parts))


# --- Checks, so that all of the state is loaded or nothing --------------------


def checked(optimizer, store):
    """Returns a checked store for Keras's `load_own_variables`."""
    # Keras assigns one variable after the other, or nothing if their number differs. A
    # store that has one more or fewer, since another run had a schedule in place of a
    # constant learning rate, or the other way round, is completed with the current
    # rate.
    variables, count = list(optimizer.variables), len(store.keys())
    others = list(_with_other_rates(_rates_in(optimizer), variables, count))
    if len(variables) != count and not others:
        return store
    kinds = _kinds_of(store)
    alike = [variables] if len(variables) == count else []
    fitting = (v for v in alike + others if not _misfits(v, kinds))
    layout = next(fitting, next(iter(alike), None))
    if layout is None:
        return store
    saved, values = _read(layout, store)
    values = dict(zip(map(id, saved), values, strict=True))
    return {
        str(i): values[id(v)] if id(v) in values else ops.convert_to_numpy(v)
        for i, v in enumerate(variables)
    }


def _read(layout, store, mended=()):
    """Returns the variables of a layout, without its None, and their arrays."""
    values = read_stored(layout, store, mended)
    pairs = [(v, x) for v, x in zip(layout, values, strict=True) if v is not None]
    return [v for v, _ in pairs], [value for _, value in pairs]


def read_stored(variables, store, mended=()):
    """Returns the arrays that a store holds for variables, or None for None."""
    # NaN and large numbers do no harm in the variables `mended`, which are repaired.
    names = set(store.keys())
    missing = [str(i) for i in range(len(variables)) if str(i) not in names]
    if missing:
        raise ValueError(
            "The state of an optimizer is stored under the numbers of its variables, "
            f"'0' to '{len(variables) - 1}'. Missing: {missing}. The file is "
            "damaged. Nothing was assigned."
        )
    mended = {id(v) for v in mended}
    values: list[Any] = []
    for i, variable in enumerate(variables):
        if variable is None:
            values.append(None)
            continue
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
    """Raises an error for NaN, and for numbers that overflow in a variable's dtype."""
    # A slot or a learning rate that is NaN makes a weight NaN at the next step,
    # although the gradients are finite. A slot may be inf, such as Adam's second
    # moment.
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
    """Returns `value` as an array of numbers that fits into `target`, a name."""
    # An integer dtype takes only whole numbers in its range.
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
