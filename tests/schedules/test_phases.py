"""Every schedule at the ends of its phases, in every way to run it, and in float64.

A compiler may multiply by the rounded inverse of a length where a schedule divides by
it, and float32 holds the integers up to 2**24 only. So single steps are at stake: the
first one and the last one of a phase, and those around them, for lengths whose inverses
are rounded up, and for others.
"""

import numpy as np
import pytest
from keras import ops

from keras_lso.compat import model_garden
from testing.schedule_cases import CASES, KINDS, LAST, SMALLEST, polynomial_case


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
    """20 numbers of steps, among them those whose rounded inverse misses 1."""
    random = np.random.default_rng(0)
    missed = [n for n in range(1, 100) if np.float32(n) * (np.float32(1) / n) != 1]
    around = [2**i + j for i in (10, 24) for j in (-1, 0, 1)]
    scattered = (10 ** random.uniform(2, 8.2, 5)).astype(int).tolist()
    return [1, 2, 3, *missed[:6], *around, *scattered]


@pytest.mark.full
@pytest.mark.parametrize("first", range(2))
def test_schedule_is_exact_for_20_lengths(first, compiled):
    lengths = some_lengths()
    assert len(set(lengths)) == 20
    cases = {
        f"{name} {n}": make(n)
        for name, (make, _) in CASES.items()
        for n in lengths[first::2]
    }
    assert not wrong_rates(cases, compiled)


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_fractional_steps_match_float64_formula(n):
    """As where a schedule counts epochs. The policies round it down."""
    cases = {name: make(n) for name, (make, _) in CASES.items()}
    for fraction in (0.25, 0.5):
        assert not wrong_rates(cases, lambda function, _: function, fraction)


LONG = [
    *("polynomial root", "piecewise", "piecewise policy", "joined", "warm-up"),
    *("1-sqrt", "inverse root", "triangular", "updates"),
]
COUNTS = [2**24 - 1, 2**24, 2**24 + 1, 2**24 + 2, LAST]


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
    "offset, n, power, initial, end",
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
