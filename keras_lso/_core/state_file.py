"""The state of a `LossScaleOptimizer` in a file, in the layout of Keras's own class.

The order is as follows, so that each class can read the other's files:

- `iteration`: the number of steps, including skipped ones. In memory, it is only the
  number of skipped steps, since a user may assign the inner optimizer's count of
  applied steps;
- `learning_rate`, which is unused. A `GuardedOptimizer` marks there that it has no loss
  scale, and a file how many masters it has;
- `step_counter` and `dynamic_scale`, of the loss-scale policy;
- the variables of the inner optimizer;
- the other variables of the loss-scale policy, and the float32 number of each weight
  that has a master, whatever the kind of masters;
- the history of a spike guard, if there is one.
"""

import itertools
from collections import Counter

import keras
import numpy as np
from keras import ops

from keras_lso._core.checks import LARGEST_STEP, warn
from keras_lso._keras_internals.optimizers import (
    base_variables_of,
    bases_of,
    iteration_variable,
)
from keras_lso._keras_internals.rules import rate_given_to
from keras_lso._keras_internals.state import (
    inner_name_in,
    restore_unsaved,
    saved_by_keras,
    weights_kept_by,
)

# The learning rate in memory of an optimizer without a loss scale. Others have 0.
_NO_SCALE = -1.0
# In a file with masters, which Keras's class does not load, it is this times their
# number, with the same sign. No rate of a bare optimizer is as large.
_MASTER = 2.0**30


class StateFile:
    """Saves and loads the variables of an optimizer, all of them or none."""

    def __init__(self, optimizer):
        self._optimizer, self._inner = optimizer, optimizer.inner_optimizer
        self._policy, self._masters = optimizer.loss_scale_policy, optimizer._masters
        # In a file, the first entry is the number of all steps.
        self._skipped, self._unused = base_variables_of(optimizer)
        self._applied = iteration_variable(self._inner)
        # Keras's class also has these, before the inner optimizer's.
        self._first = [self._skipped, self._unused, *self._policy.variables[:2]]
        spikes = optimizer._spikes
        self._of_spikes = [] if spikes is None else spikes.variables

    @property
    def variables(self):
        """The variables that are saved, in the order of the file."""
        return self._optimizer._saved_with(self._masters.masters)

    @property
    def in_memory(self):
        """The variables in memory, with the kept variables instead of the numbers."""
        return self._optimizer._in_memory

    def save(self, store):
        """Writes the state into a mapping of `"0"`, `"1"`, ... to arrays."""
        numbers = set(map(id, self._masters.masters))
        for i, variable in enumerate(self.variables):
            if id(variable) in numbers:
                variable = self._masters.saved(variable)
            # Not with `numpy()`: under OpenVINO it reads only constants in Keras 3.12.
            value = np.array(ops.convert_to_numpy(variable))
            if variable is self._skipped:
                steps = value + np.int64(ops.convert_to_numpy(self._applied))
                value = np.minimum(steps, LARGEST_STEP).astype(value.dtype)
            elif variable is self._unused and numbers:
                value = np.copysign(_MASTER * len(numbers), value, dtype=value.dtype)
            store[str(i)] = value

    def load(self, store, is_as_in_memory=False):
        """Reads the state; warns, as Keras does, if it is from another optimizer."""
        # With `is_as_in_memory`, `iteration` has the number of skipped steps, as in a
        # state that was saved without `save`.
        kinds = _kinds_of(store)
        layout = self._layout_of(store, kinds)
        if layout is None:
            # Warn, as Keras does: a model may be loaded without its optimizer.
            own, count = len(self.variables), len(kinds)
            others = "other " * (count == own)
            warn(
                "Skipping variable loading for optimizer "
                f"'{self._optimizer.name}', because it has {own} variables whereas the "
                f"saved optimizer has {count} {others}variables."
                f"{self._difference_from(store, kinds)}"
            )
            return
        weights = [*self._masters.masters, *weights_kept_by(self._inner)]
        pairs = read_stored(layout, store, weights, mended=self._policy.variables)
        variables, values = map(list, zip(*pairs, strict=True))
        if variables[0] is self._skipped and not is_as_in_memory:
            # Keras's class leaves the number of steps at 0.
            applied = next(value for v, value in pairs if v is self._applied)
            values[0] = np.maximum(values[0] - applied, 0)
        self.assign(variables, values)
        restore_unsaved(self._inner, variables)

    def assign(self, variables, values):
        """Assigns checked values to variables, and resets the rest of the state."""
        # A Python number: on PyTorch an array would change with the variable.
        own = float(ops.convert_to_numpy(self._unused))
        self._optimizer._counters.reset()
        self._policy.reset()
        for variable in self._of_spikes:
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        numbers = set(map(id, self._masters.masters))
        if numbers.isdisjoint(map(id, variables)):
            self._masters.restart()
        for variable, value in zip(variables, values, strict=True):
            if id(variable) in numbers:
                self._masters.load(variable, value)
            else:
                variable.assign(value)
        if float(ops.convert_to_numpy(self._unused)) < 0:
            self._policy.reset()
        self._unused.assign(min(own, 0.0))
        self._policy.restore()

    def say_that_there_is_no_scale(self):
        """Marks the state so that an optimizer that loads it starts a new scale."""
        self._unused.assign(_NO_SCALE)

    def _layout_of(self, store, kinds):
        """Returns the layout of a state, None if it is from another optimizer."""
        spikes = _spikes_in(kinds)
        # From an optimizer with a spike guard, or with a guard of another window.
        ends = [self._of_spikes, [], spikes] if spikes else [[]]
        own, by_keras = (
            [v + end for end in ends for v in layouts]
            for layouts in self._layouts(_masters_in(store, kinds))
        )
        found = [_fitting_layout(v, self._inner, kinds) for v in (own, by_keras)]
        fitting = list(filter(None, found))
        if len(fitting) == 2:
            # All weights are scalars. Only Keras's class leaves the count of all steps
            # at 0. Before the first step moments are 0, and a rate is not.
            steps, applied, rate_or_moment = (store[name] for name in ("0", "4", "5"))
            is_by_keras = steps < applied or applied == 0 < rate_or_moment
            return fitting[int(is_by_keras)]
        # Damage, which is an error, and no other run's state: with other layers frozen,
        # or of another optimizer, more than one entry differs.
        whole = [v[0] for v in (own, by_keras) if v and self._optimizer.built]
        damaged = (v for v in whole if _fits_but_for_one_shape(v, kinds))
        return next(itertools.chain(fitting, damaged), None)

    def _layouts(self, masters_in_file):
        """Returns the layouts that a state may have: our own, and of Keras's class."""
        first, inner = self._first, self._inner.variables
        by_keras = saved_by_keras(self._inner)
        but_masters = [*first, *inner, *self._policy.variables[2:]]
        numbers = self._masters.masters
        if masters_in_file:
            fits = masters_in_file == len(numbers)
            return [but_masters + numbers] * fits, []
        # The first two are of a user who saves `optimizer.variables` directly. Without
        # masters, they restart where the weights differ. The last is of the bare
        # inner optimizer: the scale then starts over.
        kept = numbers, self._masters.variables
        masters = [but_masters + v for v in kept if v]
        own = [*masters, but_masters, first + inner, inner]
        if not self._optimizer.built:
            # Keras's class makes the scale's variables in `build`, as ours once did.
            own.append([self._skipped, self._unused, *inner])
        return own, [first + by_keras] * (len(by_keras) < len(inner))

    def _difference_from(self, store, kinds):
        """Returns sentences on what the file and the optimizer do not share."""
        if not self._optimizer.built:
            return " The optimizer has not been built yet."
        if _masters_in(store, kinds) and not self._masters.masters:
            return (
                " The file has float32 masters of the weights, and an optimizer with "
                "`master_weights=False` has none."
            )
        own = Counter(tuple(v.shape) for v in self.variables)
        saved = Counter(shape for shape, _ in kinds.values())
        parts = {"the file": saved - own, "the optimizer": own - saved}
        words = [
            f" Only in {place}: {_in_words(shapes)}."
            for place, shapes in parts.items()
            if shapes
        ]
        name = inner_name_in(store)
        if name not in (None, self._inner.name):
            names = f"{name!r} in the file, and {self._inner.name!r} here"
            words.append(f" The inner optimizer is {names}.")
        return "".join(words)


def _in_words(shapes):
    """Returns how many arrays there are of each shape, for at most five shapes."""
    words = [f"{count} of shape {shape}" for shape, count in shapes.items()]
    if len(words) > 5:
        words = [*words[:4], f"{sum(shapes.values())} in all"]
    return ", ".join(words)


# --- Layouts: lists of variables, or of kinds where an entry is not read --------------


def _kinds_of(store):
    """Returns the kind of each entry: its shape, and whether it has integers."""
    # A store of Keras's reads the file at each look-up.
    names = store.keys()
    arrays = ((name, np.asarray(store[name])) for name in names)
    return {name: (array.shape, array.dtype.kind in "iu") for name, array in arrays}


def _masters_in(store, kinds):
    """Returns the number of masters that a file says it has."""
    rate = np.asarray(store["1"]) if "1" in kinds else np.empty(0)
    if rate.shape or rate.dtype.kind != "f":
        return 0
    count = abs(float(rate)) / _MASTER
    return int(count) if count <= len(kinds) else 0


def _spikes_in(kinds):
    """Returns the kinds of the last entries if they are a spike guard's, else []."""
    # See `SpikeHistory`.
    match last := [kinds.get(str(len(kinds) - i)) for i in (2, 1)]:
        case [((_,), False), ((3,), True)]:
            return last
    return []


def _kind_of(variable):
    if isinstance(variable, tuple):
        return variable
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return tuple(variable.shape), "int" in dtype


def _fits(variables, kinds):
    """Whether each variable has an entry of its kind."""
    return all(kinds.get(str(i)) == _kind_of(v) for i, v in enumerate(variables))


def _fits_but_for_one_shape(variables, kinds):
    """Whether a state has a layout's number of entries, and all shapes but one."""
    own = {str(i): _kind_of(v)[0] for i, v in enumerate(variables)}
    wrong = [n for n, shape in own.items() if n in kinds and kinds[n][0] != shape]
    return len(own) == len(kinds) and len(wrong) <= 1


# The kind of a learning rate that a schedule has replaced.
_RATE = (), False
# If a `MultiOptimizer` has many members, not each subset of rates is tried.
_MOST_SUBSETS = 100


def _fitting_layout(layouts, optimizer, kinds):
    """Returns the first layout that fits in all entries, else None."""
    rates, count = _rates_in(optimizer), len(kinds)
    alike = (v for v in layouts if len(v) == count)
    others = (o for v in layouts for o in _with_other_rates(rates, v, count))
    both = itertools.chain(alike, others)
    return next((v for v in both if _fits(v, kinds)), None)


def _rates_in(optimizer):
    """Returns the learning rates, `_RATE` if computed, by `id`s of counts of steps."""
    bases = bases_of(optimizer)
    rates = {id(iteration_variable(o)): rate_given_to(o) for o in bases}
    return {i: r if isinstance(r, keras.Variable) else _RATE for i, r in rates.items()}


def _with_other_rates(rates, variables, count):
    """Yields layouts of a length with schedules in place of numbers, or the reverse."""
    own = set(map(id, rates.values()))
    rest = [v for v in variables if id(v) not in own]
    steps = [id(v) for v in rest if id(v) in rates]
    if count < len(rest):
        return
    subsets = itertools.combinations(steps, count - len(rest))
    for saved in itertools.islice(subsets, _MOST_SUBSETS):
        parts = ([v, rates[id(v)]] if id(v) in saved else [v] for v in rest)
        yield list(itertools.chain.from_iterable(parts))


# --- Checks, so that all of the state is loaded or nothing --------------------


def checked(optimizer, store):
    """Returns a checked store for Keras's `load_own_variables`."""
    # Keras assigns one variable after the other, or nothing if their number differs. A
    # store without a rate, or with one too many, since only one of two runs had a
    # schedule, is completed with the current rate.
    variables = list(optimizer.variables)
    kinds = _kinds_of(store)
    layout = _fitting_layout([variables], optimizer, kinds)
    if layout is None and len(kinds) != len(variables):
        return store
    pairs = read_stored(layout or variables, store, weights_kept_by(optimizer))
    values = {id(v): value for v, value in pairs}
    found = (ops.convert_to_numpy(values.get(id(v), v)) for v in variables)
    return {str(i): value for i, value in enumerate(found)}


def read_stored(layout, store, weights, mended=()):
    """Returns pairs of the variables of a layout and their arrays in a store."""
    # The variables `weights` hold numbers of weights, which may be -inf. NaN and large
    # numbers do no harm in the variables `mended`, which are repaired.
    names = set(store.keys())
    missing = [str(i) for i in range(len(layout)) if str(i) not in names]
    if missing:
        raise ValueError(
            "The state of an optimizer is stored under the numbers of its variables, "
            f"'0' to '{len(layout) - 1}'. Missing: {missing}. The file is damaged. "
            "Nothing was assigned."
        )
    weights, mended, pairs = set(map(id, weights)), set(map(id, mended)), []
    for i, variable in enumerate(layout):
        if isinstance(variable, tuple):
            continue
        value, key = np.asarray(store[str(i)]), id(variable)
        try:
            if key in mended:
                value = check_state(variable, value)
            else:
                value = check_stored(variable, value, is_weight=key in weights)
            pairs.append((variable, value))
        except ValueError as error:
            raise ValueError(
                f"{error} To load only the model, write `load_model(path, "
                "compile=False)` or `model.load_weights(path, skip_mismatch=True)`."
            ) from error
    return pairs


def check_stored(variable, stored, is_weight=False):
    """Returns `check_state` of an array from a file, whose numbers must be sound."""
    # A NaN makes a weight NaN at the next step, although the gradients are finite, and
    # so does -inf. A slot may be inf, such as Adam's second moment.
    target = f"The optimizer's variable '{variable.path}'"
    value = check_state(variable, stored)
    if np.isnan(value).any():
        raise ValueError(
            f"{target} must not be NaN, but is in the file: the run that wrote it had "
            "diverged, or the file is damaged. Load an earlier file. Nothing was "
            "assigned."
        )
    of_infinite = stored[np.isinf(value)]
    allowed = [np.inf, -np.inf] if is_weight else [np.inf]
    if variable.name == "learning_rate":
        allowed = []
    if not np.isin(of_infinite.astype("float64"), allowed).all():
        raise ValueError(
            f"{target} must be finite in {value.dtype.name}. The file holds "
            f"{of_infinite[0]!r}. Nothing was assigned."
        )
    return value


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
    # Only the owner, such as a loss-scale policy, knows the range of other integers.
    is_count = variable.name == "iteration"
    target = f"The optimizer's variable '{variable.path}'"
    array = check_array(target, value, variable.shape, dtype, is_count)
    # Not every backend takes every array: PyTorch takes no big-endian one.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)
