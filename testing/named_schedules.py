"""The schedules with well-known names, and their reference formulas.

For a number of steps, each function returns the schedule, its formula in float64, and a
dict of the first and last steps of its phases to the exact rates there; None if the
rate is the result of rounded operations.
"""

import numpy as np

from keras_lso import schedules


def line(step, steps, start, end):
    return start + step / steps * (end - start)


def warmed_up(step, steps, start, end, rate):
    return np.where(step < steps, line(step, max(steps, 1), start, end), rate)


def half_cosine(share):
    return (1 + np.cos(np.pi * share)) / 2


# The share that is left of the way from one rate to the other.
LEFT = {
    "1-sqrt": lambda share: 1 - np.sqrt(share),
    "linear": lambda share: 1 - share,
    "cosine": half_cosine,
}


def decayed(decay, share, rate, end):
    share = np.clip(share, 0, 1)
    if decay == "exponential":
        return rate * (end / rate) ** share
    return end + (rate - end) * LEFT[decay](share)


def warmup_stable_decay(decay, n, end):
    warmup, stable, rate, initial = n // 2 + 1, 3, 0.7, 0.001
    start = warmup + stable

    def formula(step):
        later = decayed(decay, (step - start) / n, rate, end)
        return warmed_up(step, warmup, initial, rate, later)

    schedule = schedules.WarmupStableDecay(rate, warmup, stable, n, decay, end, initial)
    ends = {0: initial, warmup: rate, start: rate, start + n: end}
    return schedule, formula, ends


def warmup_cosine(n):
    warmup, rate, initial, end = n // 2 + 1, 0.7, 0.001, 0.01

    def formula(step):
        later = decayed("cosine", (step - warmup) / n, rate, end)
        return warmed_up(step, warmup, initial, rate, later)

    schedule = schedules.WarmupCosine(rate, warmup, n, end, initial)
    return schedule, formula, {0: initial, warmup: rate, warmup + n: end}


def inverse_square_root(n, timescale=None):
    def formula(step):
        scale = timescale or n
        root = np.sqrt(scale / (np.maximum(step - n, 0) + scale))
        return warmed_up(step, n, 0.0, 0.7, 0.7 * root)

    schedule = schedules.InverseSquareRoot(0.7, n, timescale)
    return schedule, formula, {0: 0.0, n: 0.7}


def one_cycle(n, share, anneal):
    initial, end = 0.7 / 25, 0.7 / 25 / 1e4
    top, last = share * n - 1, n - 1

    def formula(step):
        step = np.minimum(step, last)
        with np.errstate(all="ignore"):
            rising = decayed(anneal, step / top, initial, 0.7)
            falling = decayed(anneal, (step - top) / (last - top), 0.7, end)
        return np.where(step <= top, rising, falling)

    schedule = schedules.OneCycle(0.7, n, share, anneal=anneal)
    ends = {0: initial if top > 0 else None, last: end}
    if top > 0:
        ends[int(top)] = 0.7 if top == int(top) else None
    return schedule, formula, ends


def cyclical(mode, n):
    gamma = 0.5 ** (1 / (3 * n)) if mode == "exponential" else 1.0

    def formula(step):
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
    return (
        schedule,
        formula,
        {0: 0.01, n: middle, 2 * n: 0.01, 3 * n: None, 8 * n: 0.01},
    )


def per_update(n):
    def formula(step):
        return warmed_up(np.floor(step) // n, 7, 0.01, 0.7, 0.7)

    schedule = schedules.PerUpdate(schedules.LinearWarmup(0.7, 7, 0.01), n)
    return schedule, formula, {0: 0.01, n: None, 2 * n: None, 7 * n: 0.7}


# By their names: the case of a number of steps, and which number in `make test`.
NAMED = {
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
