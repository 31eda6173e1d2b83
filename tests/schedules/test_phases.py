"""Every schedule at the ends of its phases, in every way to run it, and in float64.

A compiler may multiply by the rounded inverse of a length where a schedule divides by
it, and float32 holds the integers up to 2**24 only. So single steps are at stake: the
first one and the last one of a phase, and those around them, for lengths whose inverses
are rounded up, and for others.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import schedules
from keras_lso.compat import model_garden, open_seq2seq
from testing.named_schedules import NAMED

EPSILON = float(np.finfo("float32").eps)
SMALLEST = float(np.finfo("float32").tiny)
LAST = 2**31 - 1

# --- The formulas, in float64 -------------------------------------------------


def line(step, steps, start, end):
    return start + step / steps * (end - start)


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


# --- The cases ----------------------------------------------------------------


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
        m,
        initial_learning_rate=0.7,
        decay_steps=n,
        decay_rate=0.96,
        staircase=stairs,
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
        {m: 0.7, m + math.floor(start): None, m + math.ceil(start): None, m + n: 0.0},
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
            {0: 0.7, n: None},
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
}

# The formulas subtract cosines and roots.
CASES |= {
    name: (lambda n, make=make: Case(*make(n), 1e-12), length)
    for name, (make, length) in NAMED.items()
}


# --- The tests ----------------------------------------------------------------


def rates_of(cases, compiled, fraction):
    """The steps and the rates of all cases, an array for each, by one program."""
    width = max(len(case.steps()) for case in cases)
    steps = np.array([np.resize(case.steps(), width) for case in cases])
    given = steps.astype("int32")
    if fraction is not None:
        # The largest float32 that is an int32.
        given = np.minimum(steps + fraction, 2**31 - 128).astype("float32")

    def rates(given):
        rows = [case.schedule(given[i]) for i, case in enumerate(cases)]
        return ops.stack([ops.broadcast_to(row, (width,)) for row in rows])

    found = compiled(rates, [])(ops.convert_to_tensor(given))
    return given.astype("float64" if fraction else "int64"), ops.convert_to_numpy(found)


def wrong_rates(cases, compiled, fraction=None):
    """What is wrong, in words: of each case the worst step.

    A rate is the result of some operations in float32, which together are off by up to
    a millionth of it; at the ends of phases it is exact.
    """
    wrong = []
    all_rates = rates_of(list(cases.values()), compiled, fraction)
    for (name, case), steps, found in zip(cases.items(), *all_rates, strict=True):
        with np.errstate(all="ignore"):
            expected = case.formula(steps)
        error = np.abs(found - expected) / (np.abs(expected) + 1e6 * case.absolute)
        for step, rate in case.ends.items():
            if rate is not None:
                is_inexact = (steps == step) & (found != np.float32(rate))
                error = np.where(is_inexact, np.maximum(error, 1.0), error)
        error = np.where(np.isnan(found), np.inf, error)
        worst = np.argmax(error)
        if error[worst] > 1e-6:
            at = f"{name} at step {steps[worst]}"
            wrong.append(f"{at}: {found[worst]!r}, not {expected[worst]}")
    return wrong


def test_schedule_is_exact_at_ends_of_phases(compiled):
    cases = {name: make(n) for name, (make, n) in CASES.items()}
    assert not wrong_rates(cases, compiled)


def some_lengths():
    """200 numbers of steps: of short runs, around powers of two, and of long ones."""
    random = np.random.default_rng(0)
    around = [2**i + j for i in range(6, 27, 4) for j in (-1, 0, 1)]
    count = 200 - 80 - len(around)
    scattered = (10 ** random.uniform(2, 8.2, count)).astype(int).tolist()
    return [*range(1, 81), *around, *scattered]


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 200, 4))
def test_schedule_is_exact_for_200_lengths(first, compiled):
    lengths = some_lengths()
    assert len(lengths) == 200
    cases = {
        f"{name} {n}": make(n)
        for name, (make, _) in CASES.items()
        for n in lengths[first : first + 4]
    }
    assert not wrong_rates(cases, compiled)


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_fractional_steps_match_float64_formula(n):
    """As where a schedule counts epochs. The policies round it down."""
    cases = {name: make(n) for name, (make, _) in CASES.items()}
    for fraction in (0.25, 0.5):
        assert not wrong_rates(cases, lambda function, _: function, fraction)


# --- Kinds of steps -----------------------------------------------------------

LONG = [
    *("polynomial root", "piecewise", "piecewise policy", "joined", "warm-up"),
    *("1-sqrt", "inverse root", "triangular", "updates"),
]
COUNTS = [2**24 - 1, 2**24, 2**24 + 1, 2**24 + 2, LAST]


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


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_large_steps_match_float64_formula_for_every_type_of_step(kind):
    for name in LONG:
        make, _ = CASES[name]
        case = make(2**24)
        for step in COUNTS:
            rate = float(case.schedule(kind(step)))
            expected = float(case.formula(np.array([step]))[0])
            assert rate == pytest.approx(expected, rel=1e-6, abs=SMALLEST), (name, step)


@pytest.mark.parametrize("rate", [0.6465283318235197, 1.3, 1.0 - 1e-9, 0.0001, 0.9])
def test_exponential_decay_over_two_billion_periods_is_not_nan(rate):
    schedule = model_garden.ExponentialDecayWithOffset(
        0, initial_learning_rate=0.5, decay_steps=1, decay_rate=rate
    )
    for step in (2**24 + 1, 2**30, 2**31 - 2):
        with np.errstate(over="ignore"):
            expected = np.float32(0.5 * np.float64(rate) ** step)
        found = float(schedule(step))
        assert found == pytest.approx(float(expected), rel=1e-5, abs=1e-37)


@pytest.mark.parametrize("kind", [int, float, np.int64, np.uint64, np.float64])
def test_step_beyond_int32_counts_as_last_step(kind):
    for name, (make, n) in CASES.items():
        schedule = make(n).schedule
        last = float(schedule(LAST))
        for step in (2**31, 2**32 + 1, 2**40):
            assert float(schedule(kind(step))) == last, (name, step)


@pytest.mark.parametrize(
    ("offset", "n", "power", "initial", "end"),
    [
        # 16.8 million and 122 thousand steps that are left are rounded to even ones.
        (2**24 - 1, 122_207, 0.5, 0.28, 0.46),
        # Hundreds that cancel each other, where their difference is 9.
        (15_604, 5, 2.0, 1.08e-5, 1.17e-5),
        (15_604, 5, 2.0, 1.17e-5, 1.08e-5),
        (10_000_000, 7, 1.0, 0.3, 0.3001),
        (1000, 10, 0.0, 0.3, 0.1),
    ],
)
def test_polynomial_decay_long_before_offset_keeps_precision(
    offset, n, power, initial, end, compiled
):
    case = polynomial_case(n, power, end, offset, initial)
    steps = np.array([0, 1, offset // 2])
    found = compiled(case.schedule, [])(ops.convert_to_tensor(steps.astype("int32")))
    expected = case.formula(steps)
    np.testing.assert_allclose(ops.convert_to_numpy(found), expected, rtol=1e-6)


def test_float32_tensor_step_matches_formula_and_is_capped():
    # Of the integers around 2**24 float32 has these.
    for name in LONG:
        make, _ = CASES[name]
        case = make(2**24)
        for step in (2**24 - 1, 2**24, 2**24 + 2, 2**31):
            rate = float(case.schedule(tensor_of("float32")(step)))
            last = min(step, 2**31 - 128)
            expected = float(case.formula(np.array([last]))[0])
            assert rate == pytest.approx(expected, rel=1e-6, abs=SMALLEST), (name, step)
