"""The inner optimizer's own step on one state, and how far the wrapper's may be off.

Each operation in float32 is off by half a unit in the last place, 6e-8, and a step is
some ten of them: 8 units, of the larger of the old and the new number, are allowed for
each element, and 1 unit of a narrow dtype. The sum in front of an element may be of
larger numbers (a norm, a difference of two products), or be on the edge of a sign. So
where that is not enough, the step is taken several times from a state whose numbers are
off by a unit at random. Four times as much is allowed then, and eight times what that
moves the element by. How often that was needed is counted.
"""

import dataclasses

import keras
import numpy as np
from keras import ops

from integration_tests.attack import gradients
from integration_tests.properties.cases import BACKEND, STATELESS
from integration_tests.properties.execution import (
    array,
    bits,
    stateless_apply,
    tensor,
    tensors,
)
from integration_tests.properties.runs import make_variables
from keras_lso._keras_internals.optimizers import cast

UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1e308}
FIRST, MORE, OTHERS, TRIALS = 8, 4, 8, 6


class Fault(AssertionError):
    """What the wrapper did, and what is right."""


@dataclasses.dataclass
class State:
    """All numbers from which a step starts, copied.

    Args:
        trained: List of arrays, of masters where there are some, as the step finds them
            where their variables were assigned.
        masters: The same as they are: until the end of a window nobody looks.
        weights: List of arrays, of the model's variables.
        slots: List of arrays, the inner optimizer's variables.
        bits: List of bytes, of these and of the model's variables.
        versions: List of how often each of the model's tensors was written to.
    """

    trained: list
    masters: list
    weights: list
    slots: list
    bits: list
    versions: list

    @classmethod
    def of(cls, run):
        trained = run.optimizer._masters.trained
        pairs = zip(trained, run.variables, strict=True)
        return cls(
            [_in_step(array(t), v) for t, v in pairs],
            [array(t) for t in trained],
            [array(v) for v in run.variables],
            [array(v) for v in run.optimizer.inner_optimizer.variables],
            bits(run.trained),
            [getattr(v.value, "_version", 0) for v in run.variables],
        )

    @property
    def all(self):
        return [*self.trained, *self.slots]


def _in_step(master, variable):
    """Returns a master as the step finds it, where its variable was assigned."""
    value = array(variable)
    is_in_step = rounded(master, variable.dtype) == value
    return np.where(is_in_step, master, value).astype(master.dtype)


def rounded(values, dtype):
    """Returns an array as `dtype` holds it; float16 saturates."""
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return np.clip(values, -65504, 65504).astype("float16").astype("float32")
    return array(ops.cast(ops.convert_to_tensor(values), dtype))


def bare_step(run, state, unscaled, random=None):
    """Returns what the inner optimizer makes of a state: arrays like `state.all`.

    Args:
        run: `Attacked`, whose inner optimizer it is.
        state: `State`.
        unscaled: List of dense arrays, tensors or None.
        random: NumPy's generator, by which the numbers are off. Defaults to `None`:
            they are not.
    """
    trained, slots = state.trained, state.slots
    dtypes = [v.dtype for v in run.optimizer._masters.trained]
    variables = make_variables(trained, dtypes)
    optimizer = run.case.inner.make()
    optimizer.build(variables)
    for name, value in run.settings.items():
        setattr(optimizer, name, value)
    if random is not None:
        trained = [_off(v, d, random) for v, d in zip(trained, dtypes, strict=True)]
        pairs = zip(slots, optimizer.variables, strict=True)
        slots = [_off(s, v.dtype, random) for s, v in pairs]
        columns = zip(unscaled, dtypes, strict=True)
        unscaled = [_off(u, d, random) for u, d in columns]
    own = [*variables, *optimizer.variables]
    for variable, value in zip(own, [*trained, *slots], strict=True):
        variable.assign(ops.cast(ops.convert_to_tensor(value), variable.dtype))
    given = [tensors([u])[0] if isinstance(u, np.ndarray) else u for u in unscaled]
    if "gradient_accumulation_steps" in run.case.inner.words:
        # Its accumulators are of these dtypes.
        pairs = zip(given, variables, strict=True)
        given = [g if g is None else cast(g, v.dtype) for g, v in pairs]
    # By the same call: see `properties/bare.py`.
    if run.step_taken.call == STATELESS:
        stateless_apply(optimizer, variables, given)
    else:
        optimizer.apply(given, variables)
    return [array(v) for v in own]


def _off(values, dtype, random):
    if isinstance(values, np.ndarray):
        if "float" not in dtype:
            return values
        unit = UNITS.get(dtype, UNITS["float32"])
        factors = 1 + unit * random.uniform(-1, 1, values.shape)
        return np.asarray(values * factors, values.dtype)
    if values is None or gradients.is_sparse(values):
        return values
    # A gradient in the caller's dtype.
    dtype = keras.backend.standardize_dtype(values.dtype)
    values = getattr(values, "resolve_neg", lambda: values)()
    return tensor(_off(array(values), dtype, random), dtype)


def squares(arrays):
    """Returns the sum of the squares of all elements, in float64."""
    present = [a for a in arrays if a is not None]
    return sum(np.square(a, dtype="float64").sum() for a in present)


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
    return True if is_small else None


def compare(run, state, choices):
    """Compares what a run holds after an applied step with the bare optimizer's.

    Args:
        run: `Attacked`.
        state: `State` before the step.
        choices: Iterable of lists of gradients, by one of which the step is explained.

    Returns:
        List of words of what was compared, one for each tensor.
    """
    faults = []
    for choice in choices:
        try:
            right = bare_step(run, state, choice)
        except Exception:
            continue
        try:
            return list(_compare(run, state, choice, right))
        except Fault as fault:
            faults.append(fault)
    if faults:
        raise faults[0]
    return ["applied, where Keras refuses"]


def _compare(run, state, unscaled, right):
    inner, masters = run.optimizer.inner_optimizer, run.optimizer._masters
    variables = [*masters.trained, *inner.variables]
    others, random = None, np.random.default_rng(0)
    for i, (variable, after) in enumerate(zip(variables, right, strict=True)):
        found, before, dtype = array(variable), state.all[i], variable.dtype
        kind = "weights" if i < len(masters.trained) else "slots"
        if "float" not in dtype:
            _check((found == after).all(), variable, found, after)
            yield f"{kind} equal"
            continue
        is_left = i < len(masters.trained) and np.array_equal(before, after)
        if is_left and np.array_equal(found, state.masters[i]):
            yield "weights left as they were"
            continue
        allowed = _allowed(before, after, dtype)
        if not _is_close(found, after, allowed).all():
            if others is None:
                count = range(TRIALS)
                others = [bare_step(run, state, unscaled, random) for _ in count]
            with np.errstate(invalid="ignore", over="ignore"):
                moved = np.max([np.abs(o[i] - after) for o in others], axis=0)
            allowed = MORE * allowed + OTHERS * np.nan_to_num(moved)
            is_right = _is_close(found, after, allowed)
            _check(is_right.all(), variable, found, after, is_right)
            kind += " (ill-conditioned)"
        yield f"{kind} close"
    columns = run.variables, masters.trained, state.masters, state.weights
    for variable, trained, master, weight in zip(*columns, strict=True):
        is_left = np.array_equal(array(trained), master)
        is_left = is_left and np.array_equal(array(variable), weight)
        if variable is not trained and not is_left:
            found, right = array(variable), rounded(array(trained), variable.dtype)
            _check(np.array_equal(found, right, equal_nan=True), variable, found, right)
            yield "rounded masters equal"


def _allowed(before, after, dtype):
    units = 1.01 if dtype in ("float16", "bfloat16") else FIRST
    size = np.maximum(np.abs(before), np.abs(after))
    with np.errstate(over="ignore"):
        return np.nan_to_num(units * UNITS.get(dtype, UNITS["float32"]) * size) + 1e-37


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
