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
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from keras_lso._backend.tensors import Variables
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

if TYPE_CHECKING:
    from keras_lso.loss_scale_optimizer import LossScaleOptimizer

# The learning rate in memory of an optimizer without a loss scale. Others have 0.
_NO_SCALE = -1.0
# In a file with masters, which Keras's class does not load, it is this times their
# number, with the same sign. No rate of a bare optimizer is as large.
_MASTER = 2.0**30


class EntrySpec(NamedTuple):
    """What an entry of a file must be to fit a variable."""

    shape: tuple[int, ...]
    is_integer: bool


# The variables of a file, in its order; an `EntrySpec` for an entry that is not read.
Layout: TypeAlias = Sequence[keras.Variable | EntrySpec]
# The entries of a file by their names: `"0"`, `"1"`, ...
Store: TypeAlias = Mapping[str, Any]
Specs: TypeAlias = dict[str, EntrySpec]


class StateFile:
    """Saves and loads the variables of an optimizer, all of them or none."""

    def __init__(self, optimizer: "LossScaleOptimizer"):
        self._optimizer, self._inner = optimizer, optimizer.inner_optimizer
        self._policy, self._masters = optimizer.loss_scale_policy, optimizer._masters
        # In a file, the first entry is the number of all steps.
        self._skipped, self._unused = base_variables_of(optimizer)
        self._applied = iteration_variable(self._inner)
        # Keras's class also has these, before the inner optimizer's.
        self._first = [self._skipped, self._unused, *self._policy.variables[:2]]
        spikes = optimizer._spikes
        self._spike_variables = [] if spikes is None else spikes.variables

    @property
    def variables(self) -> Variables:
        """The variables that are saved, in the order of the file."""
        masters = self._masters
        return masters.in_file(self._optimizer._saved_with(masters.masters))

    def save(self, store: MutableMapping[str, Any]) -> None:
        """Writes the state into a mapping of `"0"`, `"1"`, ... to arrays."""
        masters = self._masters
        for i, variable in enumerate(self.variables):
            value = self._number_of(variable)
            if variable is self._skipped:
                steps = value + np.int64(ops.convert_to_numpy(self._applied))
                value = np.minimum(steps, LARGEST_STEP).astype(value.dtype)
            elif variable is self._unused and masters.masters:
                count = len(masters.masters)
                value = np.copysign(_MASTER * count, value, dtype=value.dtype)
            store[str(i)] = value

    def _number_of(self, variable: Any) -> NDArray[Any]:
        """Returns what a file holds of a variable, or of a master or a slot."""
        if self._masters.is_coded(variable):
            variable = self._masters.saved(variable)
        # Not with `numpy()`: under OpenVINO it reads only constants in Keras 3.12.
        return np.array(ops.convert_to_numpy(variable))

    def save_inner(self, store: MutableMapping[str, Any]) -> None:
        """Writes the inner optimizer's variables, as its own class reads them."""
        for i, variable in enumerate(self._masters.in_file(self._inner.variables)):
            store[str(i)] = self._number_of(variable)

    def load_inner(self, store: Store) -> None:
        """Reads what `save_inner` writes, or the inner optimizer's class."""
        layout = self._masters.in_file(self._inner.variables)
        if len(store.keys()) != len(layout):
            # It warns, and loads nothing.
            type(self._inner).load_own_variables(self._inner, store)
            return
        for pair in read_stored(layout, store, weights_kept_by(self._inner)):
            self._put(*pair)

    def load(self, store: Store, is_as_in_memory: bool = False) -> None:
        """Reads the state; warns, as Keras does, if it is from another optimizer."""
        # With `is_as_in_memory`, `iteration` has the number of skipped steps, as in a
        # state that was saved without `save`.
        specs = _specs_of(store)
        layout = self._layout_of(store, specs)
        if layout is None:
            # Warn, as Keras does: a model may be loaded without its optimizer.
            here, count = len(self.variables), len(specs)
            others = "other " * (count == here)
            warn(
                "Skipping variable loading for optimizer "
                f"'{self._optimizer.name}', because it has {here} variables whereas "
                f"the saved optimizer has {count} {others}variables."
                f"{self._difference_from(store, specs)}"
            )
            return
        weights = [*self._masters.masters, *weights_kept_by(self._inner)]
        pairs = read_stored(layout, store, weights, repaired=self._policy.variables)
        variables, values = map(list, zip(*pairs, strict=True))
        if variables[0] is self._skipped and not is_as_in_memory:
            # Keras's class leaves the number of steps at 0.
            applied = next(value for v, value in pairs if v is self._applied)
            values[0] = np.maximum(values[0] - applied, 0)
        self.assign(variables, values)
        restore_unsaved(self._inner, variables)

    def assign(self, variables: Variables, values: Sequence[NDArray[Any]]) -> None:
        """Assigns checked values to variables, and resets the rest of the state."""
        # A Python number: on PyTorch an array would change with the variable.
        mark = float(ops.convert_to_numpy(self._unused))
        self._optimizer._counters.reset()
        self._policy.reset()
        for variable in self._spike_variables:
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        masters = set(map(id, self._masters.masters))
        if masters.isdisjoint(map(id, variables)):
            self._masters.restart()
        for variable, value in zip(variables, values, strict=True):
            self._put(variable, value)
        if float(ops.convert_to_numpy(self._unused)) < 0:
            self._policy.reset()
        self._unused.assign(min(mark, 0.0))
        self._policy.restore()

    def _put(self, variable: Any, value: NDArray[Any]) -> None:
        """Gives a variable its value, or a master or a slot its number."""
        if self._masters.is_coded(variable):
            self._masters.load(variable, value)
        else:
            variable.assign(value)

    def mark_without_scale(self) -> None:
        """Marks the state so that an optimizer that loads it starts a new scale."""
        self._unused.assign(_NO_SCALE)

    def _layout_of(self, store: Store, specs: Specs) -> Layout | None:
        """Returns the layout of a state, None if it is from another optimizer."""
        masters_in_file = _masters_in(store, specs)
        ours = self._own_layouts(masters_in_file)
        by_keras = self._keras_layouts(masters_in_file)
        if spikes := _spikes_in(specs):
            # From an optimizer with a spike guard, or with a guard of another window.
            ends: list[Layout] = [self._spike_variables, [], spikes]
            ours = [[*v, *end] for end in ends for v in ours]
            by_keras = [[*v, *end] for end in ends for v in by_keras]
        fitting = _fitting_layout(ours, self._inner, specs)
        fitting_by_keras = _fitting_layout(by_keras, self._inner, specs)
        if fitting and fitting_by_keras:
            # All weights are scalars. Only Keras's class leaves the count of all steps
            # at 0. Before the first step moments are 0, and a rate is not.
            steps, applied, rate_or_moment = (store[name] for name in ("0", "4", "5"))
            is_by_keras = steps < applied or applied == 0 < rate_or_moment
            return fitting_by_keras if is_by_keras else fitting
        if fitting or fitting_by_keras:
            return fitting or fitting_by_keras
        # Damage, which is an error, and no other run's state: with other layers frozen,
        # or of another optimizer, more than one entry differs.
        likeliest = [*ours[:1], *by_keras[:1]] if self._optimizer.built else []
        damaged = (v for v in likeliest if _fits_but_for_one_shape(v, specs))
        return next(damaged, None)

    def _own_layouts(self, masters_in_file: int) -> list[Layout]:
        """Returns the layouts of states that are not by Keras's class."""
        masters, last = self._masters, self._policy.variables[2:]
        # By a user who saves `optimizer.variables` directly.
        in_memory = [*self._first, *self._inner.variables, *last, *masters.variables]
        inner = masters.in_file(self._inner.variables)
        without_masters = [*self._first, *inner, *last]
        with_masters = without_masters + masters.masters
        if masters_in_file:
            return [with_masters] if masters_in_file == len(masters.masters) else []
        # Without masters, they restart where the weights differ.
        of_keras_policy = self._first + inner
        layouts: list[Layout] = [with_masters, in_memory, without_masters]
        # By the bare inner optimizer: the scale then starts over.
        layouts += [of_keras_policy, inner]
        if not self._optimizer.built:
            # Keras's class makes the scale's variables in `build`, as ours once did.
            layouts.append([self._skipped, self._unused, *inner])
        return layouts

    def _keras_layouts(self, masters_in_file: int) -> list[Layout]:
        """Returns the layout of Keras's class, if it does not save all variables."""
        saved = saved_by_keras(self._inner)
        saves_all = len(saved) == len(self._inner.variables)
        if saves_all or masters_in_file:
            return []
        return [self._first + self._masters.in_file(saved)]

    def _difference_from(self, store: Store, specs: Specs) -> str:
        """Returns sentences on what the file and the optimizer do not share."""
        if not self._optimizer.built:
            return (
                " The optimizer has not been built yet: call `optimizer.build("
                "model.trainable_variables)` before `load_weights`."
            )
        if _masters_in(store, specs) and not self._masters.masters:
            return (
                " The file has float32 masters of the weights, and an optimizer with "
                "`master_weights=False` has none."
            )
        here = Counter(tuple(v.shape) for v in self.variables)
        saved = Counter(spec.shape for spec in specs.values())
        parts = {"the file": saved - here, "the optimizer": here - saved}
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


def _in_words(shapes: Counter[tuple[int, ...]]) -> str:
    """Returns how many arrays there are of each shape, for at most five shapes."""
    words = [f"{count} of shape {shape}" for shape, count in shapes.items()]
    if len(words) > 5:
        words = [*words[:4], f"{sum(shapes.values())} in all"]
    return ", ".join(words)


# --- Layouts ----------------------------------------------------------------------


def _specs_of(store: Store) -> Specs:
    """Returns the spec of each entry by its name."""
    # A store of Keras's reads the file at each look-up.
    names = store.keys()
    arrays = ((name, np.asarray(store[name])) for name in names)
    return {name: EntrySpec(v.shape, v.dtype.kind in "iu") for name, v in arrays}


def _spec_of(entry: keras.Variable | EntrySpec) -> EntrySpec:
    """Returns the spec of the entry that a variable reads."""
    if isinstance(entry, EntrySpec):
        return entry
    dtype = keras.backend.standardize_dtype(entry.dtype)
    return EntrySpec(tuple(entry.shape), "int" in dtype)


def _masters_in(store: Store, specs: Specs) -> int:
    """Returns the number of masters that a file says it has."""
    rate = np.asarray(store["1"]) if "1" in specs else np.empty(0)
    if rate.shape or rate.dtype.kind != "f":
        return 0
    count = abs(float(rate)) / _MASTER
    return int(count) if count <= len(specs) else 0


def _spikes_in(specs: Specs) -> list[EntrySpec]:
    """Returns the specs of the last entries if they are a spike guard's, else []."""
    # See `SpikeHistory`.
    match [specs.get(str(len(specs) - i)) for i in (2, 1)]:
        case [EntrySpec((_,), False) as norms, EntrySpec((3,), True) as counts]:
            return [norms, counts]
    return []


def _fits(layout: Layout, specs: Specs) -> bool:
    """Whether each entry of a layout is in the file."""
    return all(specs.get(str(i)) == _spec_of(v) for i, v in enumerate(layout))


def _fits_but_for_one_shape(layout: Layout, specs: Specs) -> bool:
    """Whether a state has a layout's number of entries, and all shapes but one."""
    shapes = {str(i): _spec_of(v).shape for i, v in enumerate(layout)}
    wrong = [n for n, shape in shapes.items() if n in specs and specs[n].shape != shape]
    return len(shapes) == len(specs) and len(wrong) <= 1


# A learning rate that a schedule has replaced.
_RATE = EntrySpec((), False)
# If a `MultiOptimizer` has many members, not each subset of rates is tried.
_MOST_SUBSETS = 100


def _fitting_layout(
    layouts: list[Layout], optimizer: keras.Optimizer, specs: Specs
) -> Layout | None:
    """Returns the first layout that fits in all entries, else None."""
    rates, count = _rates_in(optimizer), len(specs)
    alike = (v for v in layouts if len(v) == count)
    others = (o for v in layouts for o in _with_other_rates(rates, v, count))
    both = itertools.chain(alike, others)
    return next((v for v in both if _fits(v, specs)), None)


def _rates_in(optimizer: keras.Optimizer) -> dict[int, keras.Variable | EntrySpec]:
    """Returns the learning rates, `_RATE` if computed, by `id`s of counts of steps."""
    bases = bases_of(optimizer)
    rates = {id(iteration_variable(o)): rate_given_to(o) for o in bases}
    return {i: r if isinstance(r, keras.Variable) else _RATE for i, r in rates.items()}


def _with_other_rates(
    rates: dict[int, keras.Variable | EntrySpec], layout: Layout, count: int
) -> Iterator[Layout]:
    """Yields layouts of a length with schedules in place of numbers, or the reverse."""
    rate_ids = set(map(id, rates.values()))
    rest = [v for v in layout if id(v) not in rate_ids]
    steps = [id(v) for v in rest if id(v) in rates]
    if count < len(rest):
        return
    subsets = itertools.combinations(steps, count - len(rest))
    for saved in itertools.islice(subsets, _MOST_SUBSETS):
        parts = ([v, rates[id(v)]] if id(v) in saved else [v] for v in rest)
        yield list(itertools.chain.from_iterable(parts))


# --- Checks, so that all of the state is loaded or nothing --------------------


def checked(
    optimizer: keras.Optimizer, store: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Returns a checked store for Keras's `load_own_variables`."""
    # Keras assigns one variable after the other, or nothing if their number differs. A
    # store without a rate, or with one too many, since only one of two runs had a
    # schedule, is completed with the current rate.
    variables = list(optimizer.variables)
    specs = _specs_of(store)
    layout = _fitting_layout([variables], optimizer, specs)
    if layout is None and len(specs) != len(variables):
        return store
    pairs = read_stored(layout or variables, store, weights_kept_by(optimizer))
    values = {id(v): value for v, value in pairs}
    arrays = (ops.convert_to_numpy(values.get(id(v), v)) for v in variables)
    return {str(i): array for i, array in enumerate(arrays)}


def read_stored(
    layout: Layout, store: Store, weights: Variables, repaired: Iterable[Any] = ()
) -> list[tuple[keras.Variable, NDArray[Any]]]:
    """Returns pairs of the variables of a layout and their arrays in a store."""
    # The variables `weights` hold numbers of weights, which may be -inf. The variables
    # `repaired` may hold NaN and large numbers: their owner replaces these.
    names = set(store.keys())
    missing = [str(i) for i in range(len(layout)) if str(i) not in names]
    if missing:
        raise ValueError(
            "The state of an optimizer is stored under the numbers of its variables, "
            f"'0' to '{len(layout) - 1}'. Missing: {missing}. The file is damaged. "
            "Nothing was assigned."
        )
    weight_ids, repaired_ids, pairs = set(map(id, weights)), set(map(id, repaired)), []
    for i, variable in enumerate(layout):
        if isinstance(variable, EntrySpec):
            continue
        value, key = np.asarray(store[str(i)]), id(variable)
        try:
            if key in repaired_ids:
                value = check_state(variable, value)
            else:
                value = check_stored(variable, value, is_weight=key in weight_ids)
            pairs.append((variable, value))
        except ValueError as error:
            raise ValueError(
                f"{error} To load only the model, write `load_model(path, "
                "compile=False)` or `model.load_weights(path, skip_mismatch=True)`."
            ) from error
    return pairs


def check_stored(
    variable: keras.Variable, stored: NDArray[Any], is_weight: bool = False
) -> NDArray[Any]:
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


def check_array(
    target: str,
    value: Any,
    shape: Sequence[int],
    dtype: str = "float32",
    is_count: bool = False,
) -> NDArray[Any]:
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


def check_state(variable: keras.Variable, value: Any) -> NDArray[Any]:
    """Returns `value` as an array of the shape and dtype of an optimizer's variable."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    # Only the owner, such as a loss-scale policy, knows the range of other integers.
    is_count = variable.name == "iteration"
    target = f"The optimizer's variable '{variable.path}'"
    array = check_array(target, value, variable.shape, dtype, is_count)
    # Not every backend takes every array: PyTorch takes no big-endian one.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)
