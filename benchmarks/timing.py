"""A step that can be timed, and the rounds in which rows are timed in turn."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass
class Step:
    """The step of a row, ready to run again and again.

    Attributes:
        run: Starts a step, and returns what to wait for.
        state: Returns weights and slots, two lists of what NumPy can read. Defaults to
            none.
        prepare: Puts the gradients right before each step. Not timed.
        extra_bytes: Returns the bytes that the step needs besides its arguments and
            results, if its compiler knows. Defaults to `None`.
    """

    run: Callable
    state: Callable = lambda: ([], [])
    prepare: Callable = lambda: None
    extra_bytes: Callable | None = None


def wall_clock(step):
    """Returns the seconds of one step whose end `run` waits for."""
    step.prepare()
    start = time.perf_counter()
    step.run()
    return time.perf_counter() - start


def time_in_turn(clocks, rounds, warmup=3):
    """Times rows round after round, so that a machine that drifts treats them alike.

    The order changes from round to round, since a row leaves its marks in caches and
    allocators for the next one.

    Args:
        clocks: Dict of names to functions that make a step and return its seconds.
        rounds: Int. Number of rounds.
        warmup: Int. Number of rounds before these, which do not count. Defaults to
            `3`.

    Returns:
        A dict of names to lists of seconds.
    """
    random = np.random.default_rng(0)
    names = list(clocks)
    seconds = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup + rounds):
            for index in random.permutation(len(names)):
                elapsed = clocks[names[index]]()
                if round_ >= warmup:
                    seconds[names[index]].append(elapsed)
    finally:
        gc.enable()
    return seconds


def summarize(seconds):
    """Returns the median and the quartiles of some seconds, in milliseconds."""
    low, median, high = np.percentile(seconds, [25, 50, 75]) * 1e3
    return {"ms": median, "low_ms": low, "high_ms": high}
