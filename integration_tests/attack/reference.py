"""The inner optimizer's own step on one state, and how far the wrapper's may be off.

Each operation in float32 is off by half a unit in the last place, 6e-8, and a step is
some ten of them: 8 units, of the larger of the old and the new number, are allowed for
each element, and 1 unit of a narrow dtype. The sum in front of an element may be of
larger numbers (a norm, a difference of two products), or be on the edge of a sign. So
where that is not enough, the step is taken several times from a state whose numbers are
off at random, by up to four units: off by one, many round to what they were, and where
two terms cancel, no trial may move an element (one of 16,387 was found so). A second
trial has each number off by the opposite, so that one of the two is beyond the edge of
a sign. Four times as much is allowed then, and twice what that moves the element by,
which is eight times what a unit does.
"""

import dataclasses
import re
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from integration_tests.attack import gradients
from integration_tests.attack.execution import (
    BACKEND,
    array,
    bits,
    compiled,
    stateless_apply,
    tensor,
    tensors,
)
from integration_tests.attack.runs import make_variables
from integration_tests.attack.setups import STATELESS
from keras_lso._backend import backend
from keras_lso._keras_internals.state import cast

UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
# The parts of a unit of a weight that a remainder of 8 bits counts.
PARTS = {"float16": 2**7, "bfloat16": 2**8}
BLOCK, LEVELS = 64, {"int8": 127, "uint8": 255}
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1e308}
FIRST, MORE, OFF_BY, OTHERS, PAIRS = 8, 4, 4, 2, 6
MEASURED = re.compile("gradient_accumulator|momentum")
# The optimizers that take norms of weights.
ADAPTIVE = {"LARS", "LAMB", "LARC", "Lamb", "Adafactor"}
# Within how many steps a schedule has its largest rate.
EARLY = 17


class Fault(AssertionError):
    """What the wrapper did, and what is right."""


@dataclasses.dataclass
class State:
    """All numbers from which a step starts, copied.

    Args:
        trained: List of arrays, of the numbers of 16-bit weights with masters, and of
            the other variables.
        slots: List of arrays, the inner optimizer's variables, and numbers of codes.
        measured: List of those among them whose norms an optimizer may take: sums of
            a window's gradients, momenta, and weights by the `ADAPTIVE` ones. Of one
            element XLA and PyTorch take a norm without its square, which overflows.
        bits: List of bytes, of these and of the model's variables.
        versions: List of how often each of the model's tensors was written to.
    """

    trained: list
    slots: list
    measured: list
    bits: list
    versions: list

    @classmethod
    def of(cls, run):
        slots = run.slots
        trained = list(map(array, run.numbers_of(run.optimizer._masters.trained)))
        numbers = list(map(array, run.numbers_of(slots)))
        pairs = zip(slots, numbers, strict=True)
        measured = [number for v, number in pairs if MEASURED.search(v.path)]
        return cls(
            trained,
            numbers,
            measured + trained * bool(ADAPTIVE.intersection(run.setup.optimizer.names)),
            bits(run.trained),
            [getattr(v.value, "_version", 0) for v in run.variables],
        )

    @property
    def all(self):
        return [*self.trained, *self.slots]


@dataclasses.dataclass
class RowsSummed:
    """A sparse gradient of which an optimizer gets the sums of repeated rows.

    They may cancel each other, and a sum is as far off as its rows.
    """

    rows: Any


def rounded(values, dtype):
    """Returns an array as `dtype` holds it; float16 saturates."""
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return np.clip(values, -65504, 65504).astype("float16").astype("float32")
    return array(ops.cast(ops.convert_to_tensor(values), dtype))


def bare_step(run, state, unscaled, trial=None, execution="eager"):
    """Returns what the inner optimizer makes of a state: arrays like `state.all`."""
    variables, optimizer = _bare(run, state, trial)
    if trial is not None:
        pairs = zip(unscaled, variables, strict=True)
        unscaled = [_off(u, v.dtype, trial[0]) for u, v in pairs]
    given = [_given(u) for u in unscaled]
    if run.setup.optimizer.accumulates:
        # Its accumulators are of these dtypes.
        pairs = zip(given, variables, strict=True)
        given = [g if g is None else cast(g, v.dtype) for g, v in pairs]
    # By the same call: on PyTorch Keras's ScheduleFreeAdamW holds a tensor that `apply`
    # changes under its hands, and `stateless_apply` does not.
    own = [*variables, *optimizer.variables]
    if run.step_taken.call == STATELESS:
        step = lambda: stateless_apply(optimizer, variables, given)  # noqa: E731
    else:
        step = lambda: optimizer.apply(given, variables)  # noqa: E731
    compiled(step, own, execution)()
    return [array(v) for v in own]


def _given(unscaled):
    """Returns a gradient as an optimizer gets it."""
    if isinstance(unscaled, RowsSummed):
        return backend.to_dense(unscaled.rows)
    return tensors([unscaled])[0] if isinstance(unscaled, np.ndarray) else unscaled


def _bare(run, state, trial=None):
    """Returns variables, and the inner optimizer of them, that hold a state."""
    dtypes = [v.dtype for v in run.optimizer._masters.trained]
    variables = make_variables(state.trained, dtypes)
    optimizer = run.setup.optimizer.make()
    optimizer.build(variables)
    for name, value in run.settings.items():
        setattr(optimizer, name, value)
    own, values = [*variables, *optimizer.variables], state.all
    if len(own) != len(values):
        raise Fault("The inner optimizer has other variables than the bare one")
    if trial is not None:
        random, right = trial
        columns = zip(values, own, right, strict=True)
        values = [_off(value, v.dtype, random, after) for value, v, after in columns]
        for member in _members(optimizer):
            if isinstance(member._learning_rate, LearningRateSchedule):
                member._learning_rate = _OffSchedule(member._learning_rate, random)
    for variable, value in zip(own, values, strict=True):
        variable.assign(ops.cast(ops.convert_to_tensor(value), variable.dtype))
    return variables, optimizer


class Draws:
    """Random numbers, or the negatives of those that the same seed has."""

    def __init__(self, seed, sign):
        self._random, self._sign = np.random.default_rng(seed), sign

    def uniform(self, shape=None):
        """Returns numbers between -1 and 1."""
        return self._sign * self._random.uniform(-1, 1, shape)


class _OffSchedule(LearningRateSchedule):
    """A schedule whose rates are off, by up to some units of its largest rate.

    Keras's `CosineDecay` is `(1 + cos(x)) / 2`, of whose rounding errors the sum keeps
    all digits where it is small: at nine tenths of a decay a compiled rate was found to
    be off by 2.4e-6 of the eager one, 40 times what a float32 is rounded by.
    """

    def __init__(self, schedule, random):
        peak = max(abs(float(array(schedule(step)))) for step in range(EARLY))
        unit = UNITS["float32"]
        self.schedule, self.by = schedule, OFF_BY * unit * peak * random.uniform()

    def __call__(self, step):
        return self.schedule(step) + self.by


def _within_formulas(run, state, right):
    """Returns by how much roundings within a formula may move each tensor.

    No trial shows those whose terms the state moves alike.
    """
    variables, optimizer = _bare(run, state)
    own = [*variables, *optimizer.variables]
    at = {id(v): i for i, v in enumerate(own)}
    before, after = (
        lambda v, values=values: np.abs(values[at[id(v)]], dtype="float64")
        for values in (state.all, right)
    )
    found = [0.0] * len(own)
    for member in _members(optimizer):
        terms = TERMS.get(type(member).__name__, lambda *_: [])
        for variable, size in terms(member, before, after) if member.built else []:
            unit = UNITS.get(variable.dtype, UNITS["float32"])
            found[at[id(variable)]] = FIRST * unit * size
    return found


def _ftrl_terms(ftrl, before, after):
    """Yields variables, and the size of what is rounded within their formulas.

    Ftrl adds `(sqrt(new) - sqrt(old)) / rate * weight` to its `linear`, where `old` and
    `new` are its accumulators. The roots of two that are close differ by a multiple of
    a unit of the root. In a graph TensorFlow makes a root of what eagerly is a power,
    and every fourth one is rounded to another number.
    """
    rate = float(array(ftrl.learning_rate))
    slots = zip(ftrl._accumulators, ftrl._linears, strict=True)
    of = ftrl._trainable_variables
    for variable, (accumulator, linear) in zip(of, slots, strict=True):
        yield linear, np.sqrt(after(accumulator)) / rate * before(variable)


def _schedule_free_terms(optimizer, before, after):
    """Yields the same of ScheduleFreeAdamW.

    It takes `(1 - beta_1) * momentum` off a weight, and adds the new one again: of a
    weight of 5e-4 that was 0.1.
    """
    share = 1 - optimizer.beta_1
    of = zip(optimizer._trainable_variables, optimizer._momentums, strict=True)
    for variable, momentum in of:
        yield variable, share * np.maximum(before(momentum), after(momentum))


TERMS = {"Ftrl": _ftrl_terms, "ScheduleFreeAdamW": _schedule_free_terms}


def _mixed(optimizer):
    """Returns the ids of the variables each element of which is moved by all others.

    Muon makes a step of matrix products, each element of which is a sum over a row and
    a column: all are off by draws from one normal distribution. The draws of one may
    all be small by chance: of 17,030 elements there is one for which none of six is
    above a quarter of the width. Another order of the sums, as that of a transposed
    gradient, may move just that one by three times the width. So each may be off by
    what the trials move any by: another order moved none by more than 0.6 of that.
    """
    found = set()
    for member in _members(optimizer):
        if type(member).__name__ != "Muon" or not member.built:
            continue
        columns = [member._trainable_variables, member.adam_velocities]
        if member.use_ema:
            columns.append(member._model_variables_moving_average)
        for variable, velocity, *average in zip(*columns, strict=True):
            # A vector is moved as by Adam, which has a velocity.
            if velocity is None:
                found |= {id(v) for v in (variable, *average)}
    return found


def _members(optimizer):
    """Returns the optimizers that move the variables of one."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(optimizer, "optimizers", [optimizer])


def _off(values, dtype, random, after=0.0):
    """Returns numbers that are off by some units of the old or the new number.

    A slot that was zero is rounded as well, as what it becomes. No sign changes: an
    average of squares below zero has no root.
    """
    if isinstance(values, np.ndarray):
        if "float" not in dtype:
            return values
        size = _units(OFF_BY, values, after, dtype)
        found = values + size * random.uniform(values.shape)
        return np.asarray(np.copysign(found, values), values.dtype)
    if values is None:
        return values
    if isinstance(values, RowsSummed):
        return RowsSummed(_off(values.rows, dtype, random))
    if gradients.is_sparse(values):
        return backend.map_values(lambda rows: _off(rows, dtype, random), values)
    # A gradient in the caller's dtype.
    dtype = keras.backend.standardize_dtype(values.dtype)
    values = getattr(values, "resolve_neg", lambda: values)()
    return tensor(_off(array(values), dtype, random), dtype)


def squares(arrays):
    """Returns the sum of the squares of all elements, in float64."""
    present = [a for a in arrays if a is not None]
    return sum(np.square(a, dtype="float64").sum() for a in present)


def has_squares(run, state, unscaled):
    """Whether squares are in the range of float32, also those of small steps.

    Where a square is 0 and the norm is not, bare LAMB makes none and ours a whole step.
    """
    measured = [*unscaled, *state.measured]
    tiny = 1e-30 if ADAPTIVE.intersection(run.setup.optimizer.names) else 0.0
    are_seen = all(not 0 < squares([values]) < tiny for values in measured)
    return are_seen and squares(measured) < 1e37


def must_apply(run, state, unscaled, scale):
    """Whether a step on these gradients is to be applied; None if it may be or not.

    A step is skipped where a cast gradient overflows, the sum of a window, or a norm,
    of scaled gradients even. Which of them a step has depends on its path. So those
    that are near to an overflow are left to the wrapper.
    """
    present = [u for u in unscaled if u is not None]
    if not all(np.isfinite(u).all() for u in present):
        return False
    dtypes = [v.dtype for v in run.optimizer._masters.trained]
    narrowest = min(LARGEST[dtype] for dtype in [*dtypes, "float32"])
    floats = [s for s in state.slots if s.dtype.kind == "f"]
    held = max((np.abs(s).max(initial=0.0) for s in floats), default=0.0)
    largest = max(np.abs(u).max(initial=0.0) for u in present)
    is_small = 8 * largest + held < narrowest / 2
    is_small = is_small and squares(unscaled) * max(scale, 1) ** 2 < 1e37
    is_small = is_small and squares(state.measured) < 1e37
    return True if is_small else None


def compare(run, state, choices):
    """Compares what a run holds after an applied step with the bare optimizer's."""
    faults = []
    for choice in choices:
        # XLA reads past the end of what Keras gathers of rows that come twice, where a
        # sparse gradient is divided by zeros: eagerly that is refused. And where a
        # square overflows in float16, it computes what is a number eagerly as a NaN.
        for execution in dict.fromkeys(["eager", run.setup.execution]):
            try:
                right = bare_step(run, state, choice, execution=execution)
            except Fault:
                raise
            except Exception:
                continue
            try:
                return _compare(run, state, choice, right, execution)
            except Fault as fault:
                faults.append(fault)
    # Without one the package has applied gradients that Keras refuses.
    if faults:
        raise faults[0]


def _compare(run, state, unscaled, right, execution):
    inner, masters = run.optimizer.inner_optimizer, run.optimizer._masters
    variables = [*masters.trained, *run.slots]
    after_step, encoded = State.of(run), _encoded(inner, masters)
    others, within, mixed = None, None, _mixed(inner)
    for i, (variable, after) in enumerate(zip(variables, right, strict=True)):
        found, before, dtype = after_step.all[i], state.all[i], variable.dtype
        leaf, draws, more = encoded.get(id(variable)), False, 0.0
        if leaf is not None and not leaf.codec.aux_is_master:
            draws = leaf.codec.is_random
            dtype = leaf.variable.dtype if draws else dtype
            if leaf.variable.dtype == "float16":
                after = np.clip(after, -65504, 65504)
            more = _shortened_by(leaf, before, after)
        is_code = dtype in LEVELS
        if "float" not in dtype and not is_code:
            _check((found == after).all(), variable, found, after)
            continue
        if is_code:
            after = _in_blocks(after)
        allowed = _allowed(before, after, "float32" if is_code else dtype, 1 + draws)
        allowed = allowed + more
        if is_code:
            allowed = allowed + _to_next_level(after, LEVELS[dtype])
        if not _is_close(found, after, allowed).all():
            if others is None:
                given = run, state, unscaled
                draws = [Draws(seed, s) for seed in range(PAIRS) for s in (1.0, -1.0)]
                others = [bare_step(*given, (d, right), execution) for d in draws]
                within = _within_formulas(run, state, right)
            with np.errstate(invalid="ignore", over="ignore"):
                moved = np.max([np.abs(o[i] - after) for o in others], axis=0)
            if id(variable) in mixed:
                moved = np.max(moved, initial=0.0, where=np.isfinite(moved))
            allowed = MORE * allowed + OTHERS * np.nan_to_num(moved) + within[i]
            is_right = _is_close(found, after, allowed)
            _check(is_right.all(), variable, found, after, is_right)
    for variable, trained, number in zip(
        run.variables, masters.trained, after_step.trained, strict=True
    ):
        if variable is not trained:
            found, right = array(variable), rounded(number, variable.dtype)
            # The kind "remainder" rounds a tie up, and reads 0 in place of some.
            allowed = _units(0.51, found, number, variable.dtype)
            is_right = (found == right) | (np.abs(found - number) <= allowed)
            # A weight without a gradient may stay infinite.
            is_right |= np.isnan(right) | (found == number)
            _check(is_right.all(), variable, found, right, is_right)


def _in_blocks(numbers):
    """Returns numbers as blocks hold them, up to 2**125, and none beside a NaN."""
    blocks = np.clip(numbers, -(2.0**125), 2.0**125).reshape(-1, BLOCK)
    has_nan = np.isnan(blocks).any(axis=1, keepdims=True)
    return np.where(has_nan, np.nan, blocks).reshape(numbers.shape)


def _to_next_level(numbers, levels):
    """Returns by how much numbers may be off as fourth roots in levels of blocks."""
    sizes = np.abs(numbers, dtype="float64").reshape(-1, BLOCK)
    largest = sizes.max(axis=1, keepdims=True)
    roots = levels * (sizes / np.maximum(largest, 1e-300)) ** 0.25
    # A root that is rounded up may be the next one's, by a digit.
    widths = ((roots + 1.01) / levels) ** 4 - (roots / levels) ** 4
    # XLA flushes what is below 2**-126.
    return (largest * widths + 2.0**-126).reshape(numbers.shape)


def compare_kinds(run, new):
    """Compares a run with the one whose file it loaded, with another kind of masters.

    Slots are as narrow as what is trained; of numbers the weights are what is left, or
    all but a part of a unit, or those beyond float16's range. Halfway between two
    weights, a number moves to the next that is rounded to its weight.
    """
    if bits(run.variables) != bits(new.variables):
        raise Fault("The weights that were loaded are not those that were saved")
    before, after = State.of(run), State.of(new)
    masters = new.optimizer._masters
    columns = zip(before.trained, masters.trained, new.variables, strict=True)
    right = [
        number if v.dtype == "float32" and keeps_parts(masters, v) else array(weight)
        for number, v, weight in columns
    ]
    variables = [*masters.trained, *new.slots]
    columns = variables, [*right, *before.slots], after.all
    for i, (variable, expected, found) in enumerate(zip(*columns, strict=True)):
        unit = UNITS.get(variable.dtype, 0.0) if i >= len(masters.trained) else 0.0
        allowed = unit * np.abs(expected) + 2.0**-38
        if i < len(masters.trained):
            [leaf] = masters.leaves_of([variable])
            allowed = allowed + _shortened_by(leaf, expected, expected)
            weight = new.variables[i]
            is_other = rounded(expected, weight.dtype) != array(weight)
            allowed = allowed + is_other * np.spacing(np.abs(expected))
        is_beyond = (np.abs(expected) > 65504) & (np.abs(found) == 65504)
        is_right = _is_close(found, expected, allowed) | is_beyond
        _check(is_right.all(), variable, found, expected, is_right)


def keeps_parts(masters, variable):
    """Whether masters keep more than the weight of a number."""
    [leaf] = masters.leaves_of([variable])
    return leaf.aux is not None


def _shortened_by(leaf, before, after):
    """Returns by how much remainders of 8 bits may change the numbers of a weight.

    One is rounded to half a part, and next to a tie of the weight to a part.
    """
    if leaf.aux is None or leaf.codec.aux_dtype != "int8":
        return 0.0
    dtype = leaf.variable.dtype
    return _units(1.01 / PARTS[dtype], before, after, dtype)


def _encoded(inner, masters):
    """Returns the 16-bit weights of masters, and of their averages, by ids."""
    found = {}
    for member in filter(lambda member: member.built, _members(inner)):
        averages = member._model_variables_moving_average if member.use_ema else []
        for i, variable in enumerate(member._trainable_variables):
            [leaf] = masters.leaves_of([variable])
            if leaf.variable is not variable:
                columns = [variable, *averages[i : i + 1]]
                found |= dict.fromkeys(map(id, columns), leaf)
    return found


def _allowed(before, after, dtype, roundings=1):
    # An average that overwrites a weight is rounded as the weight was, once more.
    count = roundings + 0.01 if dtype in ("float16", "bfloat16") else FIRST
    # A float16 below 2**-14 has a remainder in units of 2**-39.
    return _units(count, before, after, dtype) + 2.0**-38


def _units(count, before, after, dtype):
    """Returns some units of the larger of two numbers; of zeros they are zero."""
    size = np.maximum(np.abs(before), np.abs(after))
    # A float16 below its normal numbers keeps fewer digits: of 2e-6 one and a half.
    smallest = 2.0**-14 if dtype == "float16" else 0.0
    size = np.where(size > 0, np.maximum(size, smallest), 0.0)
    with np.errstate(over="ignore"):
        return np.nan_to_num(count * UNITS.get(dtype, UNITS["float32"]) * size)


def _is_close(found, right, allowed):
    # What is inf in the one order of operations may be NaN in another.
    is_equal = (found == right) | ~(np.isfinite(found) | np.isfinite(right))
    with np.errstate(invalid="ignore"):
        return is_equal | (np.abs(found - right) <= allowed)


def _check(is_right, variable, found, right, where=None):
    if is_right:
        return
    wrong = np.asarray(found != right if where is None else ~where)
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise Fault(
        f"{variable.path} ({variable.dtype}, {found.shape}, {BACKEND}): {wrong.sum()} "
        f"elements are wrong. At {at} came {found[at]!r}, and {right[at]!r} is right"
    )
