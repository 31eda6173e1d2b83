"""Schedules, their formulas in float64, and the exact rates at the ends of phases."""

import dataclasses
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
    """A schedule, and what it has to be.

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


def formula(function, *arguments, offset=0):
    return lambda step: function(step - offset, *arguments)


def polynomial_case(n, power=1.0, end=0.0, offset=0, initial=0.7):
    schedule = model_garden.PolynomialDecayWithOffset(
        offset,
        initial_learning_rate=initial,
        decay_steps=n,
        end_learning_rate=end,
        power=power,
    )
    expected = formula(polynomial, initial, n, end, power, offset=offset)
    return Case(schedule, expected, {offset: initial, offset + n: end})


def cycle_case(n, power):
    schedule = model_garden.PolynomialDecayWithOffset(
        3,
        initial_learning_rate=0.7,
        decay_steps=n,
        end_learning_rate=0.01,
        power=power,
        cycle=True,
    )
    expected = formula(polynomial, 0.7, n, 0.01, power, True, offset=3)
    return Case(schedule, expected, {3: 0.7, **ends_of_cycles(3, n, 0.01)})


def ends_of_cycles(start, n, rate=None):
    return dict.fromkeys([start + n * count for count in (1, 2, 3, 7, 10)], rate)


def exponential_case(n, stairs):
    m = n // 2 + 1
    schedule = model_garden.ExponentialDecayWithOffset(
        m, initial_learning_rate=0.7, decay_steps=n, decay_rate=0.96, staircase=stairs
    )
    expected = formula(exponential, 0.7, n, 0.96, stairs, offset=m)
    return Case(schedule, expected, {m: 0.7, **ends_of_cycles(m, n)})


def cosine_case(n):
    m = n // 2 + 1
    schedule = model_garden.CosineDecayWithOffset(
        m, initial_learning_rate=0.7, decay_steps=n
    )
    expected = formula(cosine, 0.7, n, offset=m)
    return Case(schedule, expected, {m: 0.7, m + n: 0.0}, 1e-12)


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
    expected = formula(cosine_with_warmup, 0.01, n, 0.1, 0.7, m, offset=2)
    return Case(schedule, expected, {2: 0.01, 2 + m: 0.7, 2 + m + n: 0.7 * 0.1}, 1e-12)


def step_cosine_case(n):
    m, boundaries, values = n // 2 + 1, [0, n, 3 * n], [0.7, 0.2, 0.01]
    return Case(
        model_garden.StepCosineDecayWithOffset(boundaries, values, m),
        formula(step_cosine, boundaries, values, offset=m),
        {m: 0.7, m + n: 0.2, m + 3 * n: 0.01},
        1e-12,
    )


def piecewise_case(n):
    m, boundaries, values = n // 2 + 1, [n, 3 * n], [0.7, 0.2, 0.01]
    return Case(
        model_garden.PiecewiseConstantDecayWithOffset(
            m, boundaries=boundaries, values=values
        ),
        formula(piecewise, boundaries, values, offset=m),
        {m: 0.7, m + n: 0.7, m + n + 1: 0.2, m + 3 * n: 0.2, m + 3 * n + 1: 0.01},
    )


def piecewise_policy_case(n):
    boundaries, values = [n, 3 * n], [0.7, 0.7 * 0.5, 0.7 * 0.01]
    return Case(
        open_seq2seq.PiecewiseConstant(0.7, boundaries, [0.5, 0.01]),
        lambda step: piecewise(np.floor(step), boundaries, values),
        {n: 0.7, n + 1: 0.7 * 0.5, 3 * n + 1: 0.7 * 0.01},
    )


def power_and_line_case(n):
    m, start = n // 2 + 1, 0.7 * n
    return Case(
        model_garden.PowerAndLinearDecay(0.7, n, -0.5, 0.3, m),
        formula(power_and_line, 0.7, n, -0.5, 0.3, offset=m),
        {m: None, m + math.floor(start): None, m + math.ceil(start): None, m + n: 0.0},
    )


def warmup_case(n):
    """A warm-up that ends where the decay begins, as that of MLPerf's ResNet-50."""
    m = n // 2 + 1
    decay = polynomial_case(m, power=0.5, offset=n)

    def expected(step):
        rate = decay.formula(np.maximum(step, n))
        return warmed_up(step, n, 0.01, 0.7, rate)

    schedule = schedules.LinearWarmup(decay.schedule, n, 0.01)
    return Case(schedule, expected, {0: 0.01, **decay.ends})


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


def exponential_policy_case(n, stairs):
    m = n // 2 + 1

    def expected(step):
        rate = policy(step, 0.7, m, 0, exponential, n, 0.96, stairs)
        return np.maximum(rate, 0.001)

    schedule = open_seq2seq.ExpDecay(0.7, n, 0.96, stairs, m, 0.001)
    return Case(schedule, expected, {m: 0.7, **ends_of_cycles(m, n)})


def polynomial_policy_case(n, power):
    m = n // 2 + 1
    return Case(
        open_seq2seq.PolyDecay(0.7, n, power, m, 0.01, m),
        formula(policy, 0.7, m, m, polynomial, n, 0.01, power),
        {0: 0.0, m: 0.7, m + n: 0.01},
    )


def inverse_policy_case(n):
    m = n // 2 + 1
    return Case(
        open_seq2seq.InvPolyDecay(0.7, n, 0.01, 1.0, m),
        formula(policy, 0.7, m, 0, inverse_polynomial, n, 0.01),
        {m: 0.7, m + n: 0.01},
    )


def cosine_policy_case(n):
    m = n // 2 + 1
    return Case(
        open_seq2seq.CosineDecayPolicy(0.7, n, 1.0, m, 0.1, m),
        formula(policy, 0.7, m, m, cosine, n, 0.1),
        {0: 0.0, m: 0.7, m + n: 0.7 * 0.1},
        1e-12,
    )


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


def warmup_stable_decay(decay, n, end):
    warmup, stable, rate, initial = n // 2 + 1, 3, 0.7, 0.001
    start = warmup + stable

    def expected(step):
        later = decayed(decay, (step - start) / n, rate, end)
        return warmed_up(step, warmup, initial, rate, later)

    schedule = schedules.WarmupStableDecay(rate, warmup, stable, n, decay, end, initial)
    ends = {0: initial, warmup: rate, start: rate, start + n: end}
    return Case(schedule, expected, ends, 1e-12)


def warmup_cosine(n):
    warmup, rate, initial, end = n // 2 + 1, 0.7, 0.001, 0.01

    def expected(step):
        later = decayed("cosine", (step - warmup) / n, rate, end)
        return warmed_up(step, warmup, initial, rate, later)

    schedule = schedules.WarmupCosine(rate, warmup, n, end, initial)
    return Case(schedule, expected, {0: initial, warmup: rate, warmup + n: end}, 1e-12)


def inverse_square_root(n, timescale=None):
    def expected(step):
        scale = timescale or n
        root = np.sqrt(scale / (np.maximum(step - n, 0) + scale))
        return warmed_up(step, n, 0.0, 0.7, 0.7 * root)

    schedule = schedules.InverseSquareRoot(0.7, n, timescale)
    return Case(schedule, expected, {0: 0.0, n: 0.7}, 1e-12)


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


def cyclical(mode, n):
    gamma = 0.5 ** (1 / (3 * n)) if mode == "exponential" else 1.0

    def expected(step):
        cycle, rest = np.divmod(step, 2 * n)
        heights = {
            "triangular": lambda: 1.0,
            "triangular2": lambda: 0.5**cycle,
            "exponential": lambda: gamma**step,
        }
        share = np.minimum(rest, 2 * n - rest) / n
        return 0.01 + (0.7 - 0.01) * heights[mode]() * share

    schedule = schedules.Cyclical(0.01, 0.7, n, mode, gamma)
    middle = None if mode == "exponential" else 0.7
    ends = {0: 0.01, n: middle, 2 * n: 0.01, 3 * n: None, 8 * n: 0.01}
    return Case(schedule, expected, ends, 1e-12)


def per_update(n):
    def expected(step):
        return warmed_up(np.floor(step) // n, 7, 0.01, 0.7, 0.7)

    schedule = schedules.PerUpdate(schedules.LinearWarmup(0.7, 7, 0.01), n)
    return Case(schedule, expected, {0: 0.01, n: None, 2 * n: None, 7 * n: 0.7}, 1e-12)


# By their names: the case of a number of steps; and, of `make test`, which number. The
# ends, cycles or boundaries of the schedules as they were before were wrong with it.
CASES = {
    "polynomial": (polynomial_case, 3),
    "polynomial to a rate": (lambda n: polynomial_case(n, end=0.01), 5),
    "polynomial root": (lambda n: polynomial_case(n, power=0.5), 49),
    "polynomial root to a rate": (lambda n: polynomial_case(n, 0.5, 0.01), 1000),
    "polynomial square": (lambda n: polynomial_case(n, power=2.0), 7),
    "polynomial steep": (lambda n: polynomial_case(n, 3.3, 0.01), 103),
    "polynomial up": (lambda n: polynomial_case(n, 1.5, 0.7, initial=1e-6), 12_345),
    "polynomial later": (lambda n: polynomial_case(n, 0.5, offset=n // 2), 41),
    "polynomial earlier": (lambda n: polynomial_case(n, offset=-(n // 2)), 97),
    "polynomial cycle": (lambda n: cycle_case(n, 1.0), 1000),
    "polynomial root cycle": (lambda n: cycle_case(n, 0.5), 107),
    "exponential": (lambda n: exponential_case(n, stairs=False), 9),
    "exponential stairs": (lambda n: exponential_case(n, stairs=True), 61),
    "cosine": (cosine_case, 25),
    "cosine with a warm-up": (warm_cosine_case, 47),
    "step cosine": (step_cosine_case, 11),
    "piecewise": (piecewise_case, 2**24 + 1),
    "piecewise policy": (piecewise_policy_case, 2**24 + 1),
    "power": (
        lambda n: Case(
            model_garden.DirectPowerDecay(0.7, -0.5),
            formula(power_of, 0.7, -0.5),
            # A power of 1 may be rounded in a graph of TensorFlow.
            {0: None, n: None},
        ),
        1000,
    ),
    "power and line": (power_and_line_case, 2**24 + 1),
    "power later": (
        lambda n: Case(
            model_garden.PowerDecayWithOffset(0.7, -0.5, n, 0.6),
            formula(power_later, 0.7, -0.5, 0.6, offset=n),
            {n: 0.6},
        ),
        49,
    ),
    "warm-up": (warmup_case, 12_345),
    "warm-up of a constant": (
        lambda n: Case(
            schedules.LinearWarmup(0.7, n),
            formula(warmed_up, n, 0.0, 0.7, 0.7),
            {0: 0.0, n: 0.7},
        ),
        49,
    ),
    "warm-up by a power": (
        lambda n: Case(
            schedules.PolynomialWarmup(0.7, n, 2.0),
            lambda step: 0.7 * (np.clip(step, 1, n) / n) ** 2.0,
            {n: 0.7},
        ),
        3,
    ),
    "joined": (joined_case, 12_345),
    "fixed": (
        lambda n: Case(
            open_seq2seq.FixedLR(0.7), lambda step: np.full(step.shape, 0.7), {n: 0.7}
        ),
        3,
    ),
    "exponential policy": (lambda n: exponential_policy_case(n, False), 9),
    "exponential stairs policy": (lambda n: exponential_policy_case(n, True), 61),
    "polynomial policy": (lambda n: polynomial_policy_case(n, 1.0), 3),
    "polynomial root policy": (lambda n: polynomial_policy_case(n, 0.5), 49),
    "polynomial square policy": (lambda n: polynomial_policy_case(n, 2.0), 103),
    "inverse polynomial policy": (inverse_policy_case, 5),
    "cosine policy": (cosine_policy_case, 47),
    "transformer policy": (
        lambda n: Case(
            open_seq2seq.TransformerPolicy(2.0, 16, n),
            formula(transformer, 2.0, 16, n),
            {n - 1: None},
        ),
        1000,
    ),
    "1-sqrt": (lambda n: warmup_stable_decay("1-sqrt", n, 0.0), 49),
    "1-sqrt to a rate": (lambda n: warmup_stable_decay("1-sqrt", n, 0.01), 2**24 + 1),
    "warm-up, stable, line": (lambda n: warmup_stable_decay("linear", n, 0.0), 103),
    "warm-up, stable, cosine": (lambda n: warmup_stable_decay("cosine", n, 0.0), 47),
    "warm-up, stable, exponential": (
        lambda n: warmup_stable_decay("exponential", n, 1e-4),
        1000,
    ),
    "warm-up, cosine": (warmup_cosine, 25),
    "inverse root": (inverse_square_root, 97),
    "inverse root of a timescale": (lambda n: inverse_square_root(n, 123), 3),
    "one cycle": (lambda n: one_cycle(n, 0.3, "cosine"), 50),
    "one cycle of lines": (lambda n: one_cycle(n, 0.45, "linear"), 12_347),
    "triangular": (lambda n: cyclical("triangular", n), 2**24 + 1),
    "triangular2": (lambda n: cyclical("triangular2", n), 41),
    "triangular, exponential": (lambda n: cyclical("exponential", n), 1000),
    "updates": (per_update, 61),
}


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
