"""Schedules, their formulas in float64, and the exact rates at the ends of phases."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_lso import schedules
from keras_lso.compat import model_garden, open_seq2seq

SMALLEST = float(np.finfo("float32").tiny)
LAST = 2**31 - 1


def line(step, steps, start, end):
    return start + step / max(steps, 1) * (end - start)


def warmed_up(step, steps, start, end, rate):
    return np.where(step < steps, line(step, steps, start, end), rate)


def polynomial(step, initial, steps, end=0.0001, power=1.0, cycle=False):
    if cycle:
        step = np.maximum(step, 0)
        steps = steps * np.maximum(-(-step // steps), 1)
    step = np.minimum(step, steps)
    return (initial - end) * ((steps - step) / steps) ** power + end


def exponential(step, initial, steps, decay, stairs=False):
    return initial * decay ** (step // steps if stairs else step / steps)


def half_cosine(step, steps):
    return (1 + np.cos(np.pi * np.minimum(step, steps) / steps)) / 2


def cosine(step, initial, steps, alpha=0.0):
    return initial * ((1 - alpha) * half_cosine(step, steps) + alpha)


def cosine_with_warmup(step, initial, steps, alpha, target, warmup_steps):
    rate = cosine(step - warmup_steps, target, steps, alpha)
    return warmed_up(step, warmup_steps, initial, target, rate)


def piecewise(step, boundaries, values):
    return np.asarray(values)[np.searchsorted(boundaries, step, side="left")]


def power_of(step, initial, power):
    return initial * np.maximum(step, 1.0) ** power


def power_and_line(step, initial, steps, power, fraction):
    rate = power_of(step, initial, power)
    return rate * np.clip((steps - step) / (steps * fraction), 0, 1)


def power_later(step, initial, power, before):
    rate = np.minimum(power_of(step, initial, power), before)
    return np.where(step > 0, rate, before)


def step_cosine(step, boundaries, values):
    rate = np.full(step.shape, values[-1])
    for i in reversed(range(len(boundaries) - 1)):
        start, end = boundaries[i : i + 2]
        part = half_cosine(step - start, end - start)
        fallen = values[i + 1] + (values[i] - values[i + 1]) * part
        rate = np.where(step < end, fallen, rate)
    return rate


def policy(step, rate, begin, warmup, decayed, *arguments):
    step = np.floor(step)
    rate = np.where(step < warmup, rate * step / max(warmup, 1), rate)
    decayed_rate = decayed(np.maximum(step - begin, 0), rate, *arguments)
    return np.where(step < begin, rate, decayed_rate)


def inverse_polynomial(step, rate, steps, end):
    k = (rate / end - 1) / steps
    return np.maximum(rate / (1 + k * step), end)


def transformer(step, rate, width, warmup):
    step = np.floor(step) + 1.0
    return rate * width**-0.5 * np.minimum(step * warmup**-1.5, step**-0.5)


@dataclasses.dataclass
class Case:
    """A schedule with its expected rates.

    Attributes:
        schedule: The schedule.
        formula: Function of an array of steps that returns float64.
        ends: Dict of the first and last steps of phases to the exact rates there, or
            to None where the rate is the result of rounded operations.
        absolute: Float. The error that the formula itself makes, in float64.
    """

    schedule: Any
    formula: Callable
    ends: dict
    absolute: float = SMALLEST

    def steps(self):
        """The ends of the phases and the steps around them, middles, and far beyond."""
        ends = np.array(sorted({0, *self.ends}))
        near = np.add.outer(ends, [-1, 0, 1]).ravel()
        middles = (ends[1:] + ends[:-1]) // 2
        beyond = [2 * ends[-1] + 1, 7 * ends[-1] + 3, 2**24 - 1, 2**24, 2**24 + 1, LAST]
        steps = np.concatenate([near, middles, beyond])
        return steps[(steps >= 0) & (steps <= LAST)]


# By their names: a function that makes the case of a number of steps, and the number in
# `make test`, with which an earlier version of the schedule was wrong.
CASES: dict[str, tuple[Callable[[int], Case], int]] = {}


def named(name, n, **arguments):
    """Returns a decorator that enters a function of a number of steps in `CASES`."""

    def enter(make):
        CASES[name] = functools.partial(make, **arguments), n
        return make

    return enter


def case_of(schedule, ends, function, *arguments, offset=0, absolute=SMALLEST):
    """Returns a case whose ends and whose formula count from an offset."""
    return Case(
        schedule,
        lambda step: function(step - offset, *arguments),
        {offset + step: rate for step, rate in ends.items()},
        absolute,
    )


def ends_of_cycles(n, rate=None):
    return dict.fromkeys([n * count for count in (1, 2, 3, 7, 10)], rate)


# --- The Model Garden's schedules -----------------------------------------------------


@named("polynomial", 3)
@named("polynomial to a rate", 5, end=0.01)
@named("polynomial root", 49, power=0.5)
@named("polynomial root to a rate", 1000, power=0.5, end=0.01)
@named("polynomial square", 7, power=2.0)
@named("polynomial steep", 103, power=3.3, end=0.01)
@named("polynomial up", 12_345, power=1.5, end=0.7, initial=1e-6)
@named("polynomial cycle", 1000, end=0.01, offset=3, cycle=True)
@named("polynomial root cycle", 107, power=0.5, end=0.01, offset=3, cycle=True)
def polynomial_case(n, power=1.0, end=0.0, offset=0, initial=0.7, cycle=False):
    schedule = model_garden.PolynomialDecayWithOffset(
        offset,
        initial_learning_rate=initial,
        decay_steps=n,
        end_learning_rate=end,
        power=power,
        cycle=cycle,
    )
    ends = {0: initial, **(ends_of_cycles(n, end) if cycle else {n: end})}
    arguments = initial, n, end, power, cycle
    return case_of(schedule, ends, polynomial, *arguments, offset=offset)


@named("polynomial later", 41, power=0.5, sign=1)
@named("polynomial earlier", 97, power=1.0, sign=-1)
def moved_polynomial_case(n, power, sign):
    return polynomial_case(n, power, offset=sign * (n // 2))


@named("exponential", 9, stairs=False)
@named("exponential stairs", 61, stairs=True)
def exponential_case(n, stairs):
    m = n // 2 + 1
    schedule = model_garden.ExponentialDecayWithOffset(
        m, initial_learning_rate=0.7, decay_steps=n, decay_rate=0.96, staircase=stairs
    )
    ends = {0: 0.7, **ends_of_cycles(n)}
    return case_of(schedule, ends, exponential, 0.7, n, 0.96, stairs, offset=m)


@named("cosine", 25)
def cosine_case(n):
    m = n // 2 + 1
    schedule = model_garden.CosineDecayWithOffset(
        m, initial_learning_rate=0.7, decay_steps=n
    )
    ends = {0: 0.7, n: 0.0}
    return case_of(schedule, ends, cosine, 0.7, n, offset=m, absolute=1e-12)


@named("cosine with a warm-up", 47)
def warm_cosine_case(n):
    m = n // 2 + 1
    schedule = model_garden.CosineDecayWithOffset(
        2,
        initial_learning_rate=0.01,
        decay_steps=n,
        alpha=0.1,
        warmup_target=0.7,
        warmup_steps=m,
    )
    ends, arguments = {0: 0.01, m: 0.7, m + n: 0.7 * 0.1}, (0.01, n, 0.1, 0.7, m)
    return case_of(
        schedule, ends, cosine_with_warmup, *arguments, offset=2, absolute=1e-12
    )


@named("step cosine", 11)
def step_cosine_case(n):
    m, boundaries, values = n // 2 + 1, [0, n, 3 * n], [0.7, 0.2, 0.01]
    schedule = model_garden.StepCosineDecayWithOffset(boundaries, values, m)
    ends = dict(zip(boundaries, values, strict=True))
    arguments = boundaries, values
    return case_of(schedule, ends, step_cosine, *arguments, offset=m, absolute=1e-12)


@named("piecewise", 2**24 + 1)
def piecewise_case(n):
    m, boundaries, values = n // 2 + 1, [n, 3 * n], [0.7, 0.2, 0.01]
    schedule = model_garden.PiecewiseConstantDecayWithOffset(
        m, boundaries=boundaries, values=values
    )
    ends = {0: 0.7, n: 0.7, n + 1: 0.2, 3 * n: 0.2, 3 * n + 1: 0.01}
    return case_of(schedule, ends, piecewise, boundaries, values, offset=m)


@named("power", 1000)
def power_case(n):
    schedule = model_garden.DirectPowerDecay(0.7, -0.5)
    # A power of 1 may be rounded in a graph of TensorFlow.
    return case_of(schedule, {0: None, n: None}, power_of, 0.7, -0.5)


@named("power and line", 2**24 + 1)
def power_and_line_case(n):
    m, start = n // 2 + 1, 0.7 * n
    schedule = model_garden.PowerAndLinearDecay(0.7, n, -0.5, 0.3, m)
    ends = {0: None, math.floor(start): None, math.ceil(start): None, n: 0.0}
    return case_of(schedule, ends, power_and_line, 0.7, n, -0.5, 0.3, offset=m)


@named("power later", 49)
def power_later_case(n):
    schedule = model_garden.PowerDecayWithOffset(0.7, -0.5, n, 0.6)
    return case_of(schedule, {0: 0.6}, power_later, 0.7, -0.5, 0.6, offset=n)


# --- OpenSeq2Seq's policies -----------------------------------------------------------


@named("piecewise policy", 2**24 + 1)
def piecewise_policy_case(n):
    boundaries, values = [n, 3 * n], [0.7, 0.7 * 0.5, 0.7 * 0.01]
    return Case(
        open_seq2seq.PiecewiseConstant(0.7, boundaries, [0.5, 0.01]),
        lambda step: piecewise(np.floor(step), boundaries, values),
        {n: 0.7, n + 1: 0.7 * 0.5, 3 * n + 1: 0.7 * 0.01},
    )


@named("fixed", 3)
def fixed_case(n):
    schedule = open_seq2seq.FixedLR(0.7)
    return Case(schedule, lambda step: np.full(step.shape, 0.7), {n: 0.7})


@named("exponential policy", 9, stairs=False)
@named("exponential stairs policy", 61, stairs=True)
def exponential_policy_case(n, stairs):
    m = n // 2 + 1

    def expected(step):
        rate = policy(step, 0.7, m, 0, exponential, n, 0.96, stairs)
        return np.maximum(rate, 0.001)

    schedule = open_seq2seq.ExpDecay(0.7, n, 0.96, stairs, m, 0.001)
    ends = {m + step: rate for step, rate in ends_of_cycles(n).items()}
    return Case(schedule, expected, {m: 0.7, **ends})


@named("polynomial policy", 3, power=1.0)
@named("polynomial root policy", 49, power=0.5)
@named("polynomial square policy", 103, power=2.0)
def polynomial_policy_case(n, power):
    m = n // 2 + 1
    schedule = open_seq2seq.PolyDecay(0.7, n, power, m, 0.01, m)
    ends = {0: 0.0, m: 0.7, m + n: 0.01}
    return case_of(schedule, ends, policy, 0.7, m, m, polynomial, n, 0.01, power)


@named("inverse polynomial policy", 5)
def inverse_policy_case(n):
    m = n // 2 + 1
    schedule = open_seq2seq.InvPolyDecay(0.7, n, 0.01, 1.0, m)
    ends = {m: 0.7, m + n: 0.01}
    return case_of(schedule, ends, policy, 0.7, m, 0, inverse_polynomial, n, 0.01)


@named("cosine policy", 47)
def cosine_policy_case(n):
    m = n // 2 + 1
    schedule = open_seq2seq.CosineDecayPolicy(0.7, n, 1.0, m, 0.1, m)
    ends, arguments = {0: 0.0, m: 0.7, m + n: 0.7 * 0.1}, (0.7, m, m, cosine, n, 0.1)
    return case_of(schedule, ends, policy, *arguments, absolute=1e-12)


@named("transformer policy", 1000)
def transformer_policy_case(n):
    schedule = open_seq2seq.TransformerPolicy(2.0, 16, n)
    return case_of(schedule, {n - 1: None}, transformer, 2.0, 16, n)


# --- The package's own schedules ------------------------------------------------------


@named("warm-up", 12_345)
def warmup_case(n):
    """Ends its warm-up where the decay begins, as MLPerf's ResNet-50 does."""
    m = n // 2 + 1
    decay = polynomial_case(m, power=0.5, offset=n)

    def expected(step):
        rate = decay.formula(np.maximum(step, n))
        return warmed_up(step, n, 0.01, 0.7, rate)

    schedule = schedules.LinearWarmup(decay.schedule, n, 0.01)
    return Case(schedule, expected, {0: 0.01, **decay.ends})


@named("warm-up of a constant", 49)
def warmup_of_constant_case(n):
    schedule = schedules.LinearWarmup(0.7, n)
    return case_of(schedule, {0: 0.0, n: 0.7}, warmed_up, n, 0.0, 0.7, 0.7)


@named("warm-up by a power", 3)
def power_warmup_case(n):
    schedule = schedules.PolynomialWarmup(0.7, n, 2.0)
    return Case(schedule, lambda step: 0.7 * (np.clip(step, 1, n) / n) ** 2, {n: 0.7})


@named("joined", 12_345)
def joined_case(n):
    m = n // 2 + 1
    warmup = schedules.LinearWarmup(0.7, n)
    decay = polynomial_case(m, power=0.5, initial=0.5)

    def expected(step):
        decayed = decay.formula(np.maximum(step - n, 0))
        rate = np.where(step < n + m, decayed, 0.01)
        return np.where(step < n, line(step, n, 0.0, 0.7), rate)

    schedule = schedules.JoinedSchedules([warmup, decay.schedule, 0.01], [n, n + m])
    return Case(schedule, expected, {0: 0.0, n: 0.5, n + m: 0.01})


# The share that is left of the way from one rate to the other.
LEFT = {
    "1-sqrt": lambda share: 1 - np.sqrt(share),
    "linear": lambda share: 1 - share,
    "cosine": lambda share: half_cosine(share, 1),
}


def decayed(decay, share, rate, end):
    share = np.clip(share, 0, 1)
    if decay == "exponential":
        return rate * (end / rate) ** share
    return end + (rate - end) * LEFT[decay](share)


@named("1-sqrt", 49, decay="1-sqrt")
@named("1-sqrt to a rate", 2**24 + 1, decay="1-sqrt", end=0.01)
@named("warm-up, stable, line", 103, decay="linear")
@named("warm-up, stable, cosine", 47, decay="cosine")
@named("warm-up, stable, exponential", 1000, decay="exponential", end=1e-4)
@named("warm-up, cosine", 25, decay="cosine", end=0.01, stable=0)
def warmup_stable_decay(n, decay, end=0.0, stable=3):
    warmup, rate, initial = n // 2 + 1, 0.7, 0.001
    start = warmup + stable
    schedule = schedules.WarmupCosine(rate, warmup, n, end, initial)
    if stable:
        later = stable, n, decay, end, initial
        schedule = schedules.WarmupStableDecay(rate, warmup, *later)

    def expected(step):
        later = decayed(decay, (step - start) / n, rate, end)
        return warmed_up(step, warmup, initial, rate, later)

    ends = {0: initial, warmup: rate, start: rate, start + n: end}
    return Case(schedule, expected, ends, 1e-12)


@named("inverse root", 97)
@named("inverse root of a timescale", 3, timescale=123)
def inverse_square_root(n, timescale=None):
    def expected(step):
        scale = timescale or n
        root = np.sqrt(scale / (np.maximum(step - n, 0) + scale))
        return warmed_up(step, n, 0.0, 0.7, 0.7 * root)

    schedule = schedules.InverseSquareRoot(0.7, n, timescale)
    return Case(schedule, expected, {0: 0.0, n: 0.7}, 1e-12)


@named("one cycle", 50, share=0.3, anneal="cosine")
@named("one cycle of lines", 12_347, share=0.45, anneal="linear")
def one_cycle(n, share, anneal):
    initial, end = 0.7 / 25, 0.7 / 25 / 1e4
    top, last = share * n - 1, n - 1

    def expected(step):
        step = np.minimum(step, last)
        with np.errstate(all="ignore"):
            rising = decayed(anneal, step / top, initial, 0.7)
            falling = decayed(anneal, (step - top) / (last - top), 0.7, end)
        return np.where(step <= top, rising, falling)

    schedule = schedules.OneCycle(0.7, n, share, anneal=anneal)
    ends = {0: initial if top > 0 else None, last: end}
    if top > 0:
        ends[int(top)] = 0.7 if top == int(top) else None
    return Case(schedule, expected, ends, 1e-12)


@named("triangular", 2**24 + 1, mode="triangular")
@named("triangular2", 41, mode="triangular2")
@named("triangular, exponential", 1000, mode="exponential")
def cyclical(n, mode):
    gamma = 0.5 ** (1 / (3 * n)) if mode == "exponential" else 1.0

    def expected(step):
        cycle, rest = np.divmod(step, 2 * n)
        height = 0.5**cycle if mode == "triangular2" else gamma**step
        return 0.01 + (0.7 - 0.01) * height * np.minimum(rest, 2 * n - rest) / n

    schedule = schedules.Cyclical(0.01, 0.7, n, mode, gamma)
    middle = None if mode == "exponential" else 0.7
    ends = {0: 0.01, n: middle, 2 * n: 0.01, 3 * n: None, 8 * n: 0.01}
    return Case(schedule, expected, ends, 1e-12)


@named("updates", 61)
def per_update(n):
    def expected(step):
        return warmed_up(np.floor(step) // n, 7, 0.01, 0.7, 0.7)

    schedule = schedules.PerUpdate(schedules.LinearWarmup(0.7, 7, 0.01), n)
    return Case(schedule, expected, {0: 0.01, n: None, 2 * n: None, 7 * n: 0.7}, 1e-12)


def variable_of(step):
    return keras.Variable(step, dtype="int", trainable=False)


def tensor_of(dtype):
    return lambda step: ops.convert_to_tensor(np.array(step, dtype))


KINDS = {
    "int": int,
    "float": float,
    "NumPy's int64": np.int64,
    "NumPy's uint32": np.uint32,
    "NumPy's float64": np.float64,
    "array": np.array,
    "int32 tensor": tensor_of("int32"),
    "int64 tensor": tensor_of("int64"),
    "variable": variable_of,
}
