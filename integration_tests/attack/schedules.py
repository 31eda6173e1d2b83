"""Schedules with random arguments at random steps, each compared with float64.

The formulas, and the cases that are exact at the ends of phases, are those of
`testing/schedule_cases.py`; unit tests try them for some lengths and one step a time.
"""

import numpy as np
from keras import ops

from integration_tests.attack.cases import BACKEND, COMPILED
from integration_tests.attack.optimizers import between, one_of, power_of_ten
from integration_tests.attack.reference import Fault
from keras_lso import schedules
from keras_lso.compat import model_garden, open_seq2seq
from testing import schedule_cases as phases

LAST = 2**31 - 2
# What a float32 step may be: those of 2**24 and above are even.
EXACT = 2**24
# Ten roundings of 6e-8, and those of the rate itself.
SHARE = 2e-6
HALF_UNIT = 2.0**-24
LENGTHS = one_of(
    lambda r: int(r.integers(1, 20)),
    lambda r: int(10 ** r.uniform(1, 7)),
    lambda r: int(2 ** r.integers(1, 25) + r.integers(-1, 2)),
)


def length(random):
    return LENGTHS(random)(random)


def nothing(step):
    return 0.0


def offset(random):
    return one_of(0, length(random), -length(random))(random)


def polynomial(random, cycle=False):
    n, m, initial, end, power = length(random), offset(random), *_rates(random, 2), 1.0
    power = one_of(1.0, 0.5, 2.0, between(0.2, 3.0)(random))(random)
    schedule = model_garden.PolynomialDecayWithOffset(
        m,
        initial_learning_rate=initial,
        decay_steps=n,
        end_learning_rate=end,
        power=power,
        cycle=cycle,
    )
    arguments = initial, n, end, power, cycle
    formula = phases.formula(phases.polynomial, *arguments, offset=m)

    def lost(step):
        """Before the offset the rate is a difference, and a power of what is large.

        The two numbers of the difference are rounded. A power is `exp(p * log(x))`,
        and `p` is rounded, and the product: each moves the power by 6e-8 of itself,
        times the product.
        """
        if cycle or step >= m:
            return 0.0
        exponent = power * np.log((m + n - step) / n)
        return SHARE * end + 2 * HALF_UNIT * exponent * abs(formula(step) - end)

    return schedule, formula, [m, m + n], lost


def polynomial_cycle(random):
    return polynomial(random, cycle=True)


def exponential(random):
    n, m, [initial] = length(random), offset(random), _rates(random, 1)
    decay, stairs = between(0.5, 1.0)(random), one_of(False, True)(random)
    schedule = model_garden.ExponentialDecayWithOffset(
        m,
        initial_learning_rate=initial,
        decay_steps=n,
        decay_rate=decay,
        staircase=stairs,
    )
    arguments = initial, n, decay, stairs
    ends = [m, m + n, m + 2 * n]
    return schedule, phases.formula(phases.exponential, *arguments, offset=m), ends


def cosine(random):
    n, m, warmup = length(random), offset(random), length(random)
    initial, alpha, target = _rates(random, 3)
    schedule = model_garden.CosineDecayWithOffset(
        m,
        initial_learning_rate=initial,
        decay_steps=n,
        alpha=alpha,
        warmup_target=target,
        warmup_steps=warmup,
    )
    arguments = initial, n, alpha, target, warmup
    formula = phases.formula(phases.cosine_with_warmup, *arguments, offset=m)
    return schedule, formula, [m, m + warmup, m + warmup + n]


def boundaries(random):
    found = np.unique([length(random) for _ in range(random.integers(1, 5))])
    return [int(n) for n in found]


def step_cosine(random):
    ends, m = [0, *boundaries(random)], offset(random)
    values = _rates(random, len(ends))
    schedule = model_garden.StepCosineDecayWithOffset(ends, values, m)
    formula = phases.formula(phases.step_cosine, ends, values, offset=m)
    return schedule, formula, [m + end for end in ends]


def piecewise(random):
    ends, m = boundaries(random), offset(random)
    values = _rates(random, len(ends) + 1)
    schedule = model_garden.PiecewiseConstantDecayWithOffset(
        m, boundaries=ends, values=values
    )
    formula = phases.formula(phases.piecewise, ends, values, offset=m)
    return schedule, formula, [m + end for end in ends]


def power_and_line(random):
    n, m, [initial] = length(random), offset(random), _rates(random, 1)
    power, share = between(-1.0, 1.0)(random), between(0.05, 1.0)(random)
    schedule = model_garden.PowerAndLinearDecay(initial, n, power, share, m)
    arguments = initial, n, power, share
    ends = [m, m + n, m + int(n * (1 - share))]
    return schedule, phases.formula(phases.power_and_line, *arguments, offset=m), ends


def power_later(random):
    m, [initial, before] = offset(random), _rates(random, 2)
    power = between(-1.0, 1.0)(random)
    schedule = model_garden.PowerDecayWithOffset(initial, power, m, before)
    arguments = initial, power, before
    return schedule, phases.formula(phases.power_later, *arguments, offset=m), [m]


def warmup(random):
    n, [initial] = length(random), _rates(random, 1)
    decay, formula, ends, *lost = one_of(polynomial, exponential, piecewise)(random)(
        random
    )
    lost_by_decay = lost[0] if lost else nothing
    rate = formula(np.float64(n))
    if not abs(rate) < 1e30:
        return decay, formula, ends, lost_by_decay

    def lost_by_warmup(step):
        """The line has what its end has, and is a difference where that is negative."""
        if step >= n:
            return lost_by_decay(step)
        done = step / n
        return done * lost_by_decay(n) + (rate < 0) * SHARE * (1 - done) * initial

    return (
        schedules.LinearWarmup(decay, n, initial),
        lambda step: phases.warmed_up(step, n, initial, rate, formula(step)),
        [n, *ends],
        lost_by_warmup,
    )


def polynomial_policy(random):
    n, begin, warmup = (length(random) for _ in range(3))
    [rate, low], power = _rates(random, 2), between(0.2, 3.0)(random)
    schedule = open_seq2seq.PolyDecay(rate, n, power, begin, low, warmup)
    arguments = rate, begin, warmup, phases.polynomial, n, low, power
    ends = [warmup, begin, begin + n]
    return schedule, phases.formula(phases.policy, *arguments), ends


def cosine_policy(random):
    n, begin, warmup = (length(random) for _ in range(3))
    rate, low = _rates(random, 2)
    schedule = open_seq2seq.CosineDecayPolicy(rate, n, 1.0, begin, low, warmup)
    arguments = rate, begin, warmup, phases.cosine, n, low
    ends = [warmup, begin, begin + n]
    return schedule, phases.formula(phases.policy, *arguments), ends


def transformer(random):
    n, width, [rate] = length(random), length(random), _rates(random, 1)
    schedule = open_seq2seq.TransformerPolicy(rate, width, n)
    return schedule, phases.formula(phases.transformer, rate, width, n), [n - 1]


def _rates(random, count):
    return [power_of_ten(-6, 0.5)(random) for _ in range(count)]


SCHEDULES = [
    *(polynomial, polynomial_cycle, exponential, cosine, step_cosine, piecewise),
    *(power_and_line, power_later, warmup, polynomial_policy, cosine_policy),
    transformer,
]
KINDS = {
    **{name: phases.KINDS[name] for name in ("int", "NumPy's int64", "int32 tensor")},
    **{name: phases.KINDS[name] for name in ("float", "int64 tensor", "variable")},
    "float32 tensor": phases.tensor_of("float32"),
}


def attack(mode, random, tally, words):
    """Tries a schedule at several steps: see `integration_tests.attack.run.attack`."""
    make = one_of(*SCHEDULES)(random)
    schedule, formula, ends, *lost = make(random)
    lost = lost[0] if lost else nothing
    words.append(f"{make.__name__}: {schedule.get_config()}")
    near = [end + by for end in ends for by in (-1, 0, 1)]
    among = random.integers(0, 2 * max(*ends, 1) + 2, 5)
    steps = {0, *near, *map(int, among), EXACT - 1, EXACT + 1, LAST}
    # Before an offset a formula goes on, and loses its digits. With an early one the
    # last steps are no int32.
    begin = min(ends)
    steps = [s for s in sorted(steps) if max(begin, 0) <= s <= LAST + min(begin, 0)]
    rate_at = _compiled(schedule, mode)
    for step in steps:
        kind = one_of(*KINDS)(random) if mode not in COMPILED else "int32 tensor"
        if kind == "float32 tensor" and step > EXACT:
            continue
        found = float(ops.convert_to_numpy(rate_at(KINDS[kind](step))))
        with np.errstate(all="ignore"):
            right = float(formula(np.array([step], "float64"))[0])
        if not abs(right) < 1e30:
            # What a decay would have been long before its offset.
            continue
        if not abs(found - right) <= SHARE * abs(right) + lost(step) + 1e-12:
            raise Fault(
                f"At step {step} ({kind}) came {found!r}, and {right!r} is right"
            )
        tally[f"rates of a {kind}"] += 1
    tally["steps"] += len(steps)


def _compiled(schedule, mode):
    if mode not in COMPILED:
        return schedule
    if BACKEND == "jax":
        import jax

        return jax.jit(schedule.__call__)
    import tensorflow as tf

    return tf.function(schedule.__call__, jit_compile=mode == "xla")
