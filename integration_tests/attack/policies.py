"""Loss-scale policies with random arguments, and what each does, in NumPy."""

import math

import numpy as np

from integration_tests.attack.optimizers import between, one_of
from integration_tests.properties.policies import (
    F32,
    Expected,
    ExpectedDynamic,
    ExpectedLogMax,
    Policy,
)
from keras_lso import loss_scales

SCALES = one_of(1.0, 8.0, 1000.0, 2.0**15, 0.125, 2.0**-14, 3e-3, 1e6)
BOUNDS = one_of((2.0**-14, 2.0**24), (1.0, 2.0**15), (0.3, 1e9), (3.0, 3.0))


class ExpectedSearching(ExpectedDynamic):
    """The docstring of `SearchingLossScale`."""

    def __init__(self, initial, low, high, period, factor, search_factor, search):
        super().__init__(initial, low, high, period, F32(factor), 1 / factor)
        self.search_factor, self.search = search_factor, min(search, period)
        climbs = math.log(search_factor) / math.log(factor)
        self.climbs = math.ceil(climbs - 1e-9) - 1
        self.has_found = self.has_fallen = False
        self.climbs_left = 0

    def step(self, finite, amax):
        if not self.has_found and not finite:
            self.has_fallen, self.counter = True, 0
            fallen = self.scale * F32(1 / self.search_factor)
            self.scale = np.clip(fallen, self.low, self.high)
        elif self.has_found and self.climbs_left:
            usual, self.period = self.period, self.search
            # The first finite step counts, too.
            self.counter = min(self.counter, self.search - 1)
            super().step(finite, amax)
            self.period = usual
            has_grown = finite and not self.counter
            self.climbs_left = self.climbs_left - has_grown if finite else 0
        else:
            super().step(finite, amax)
            if not self.has_found:
                self.climbs_left = self.climbs if self.has_fallen else 0
                self.has_found = True


class ExpectedMaximum(ExpectedLogMax):
    """In float32 a spread of 0 may be the root of a rounding."""

    def step(self, finite, amax):
        super().step(finite, amax)
        self.tolerance += 5e-4 * self.largest * self.deviations


def policy(random):
    return one_of(dynamic, dynamic, fixed, log_max, searching)(random)(random)


def fixed(random):
    value = SCALES(random)
    return _policy(loss_scales.FixedLossScale, [value], Expected, [value] * 3)


def dynamic(random):
    initial, low, high = _within(random)
    period, hysteresis = int(random.integers(1, 5)), int(random.integers(1, 4))
    growth, backoff = between(1.001, 4.0)(random), between(1e-3, 0.99)(random)
    refills = one_of(False, True)(random)
    arguments = [initial, period, 2.0, low, high, growth, backoff]
    options = {"hysteresis": hysteresis, "consecutive_hysteresis": refills}
    expected = [initial, low, high, period, growth, backoff, hysteresis, refills]
    names = ["initial_loss_scale", "increment_period", "multiplier", "min_scale"]
    names += ["max_scale", "growth_factor", "backoff_factor"]
    options |= dict(zip(names, arguments, strict=True))
    return _policy(loss_scales.DynamicLossScale, [], ExpectedDynamic, expected, options)


def searching(random):
    initial, low, high = _within(random)
    period, search = int(random.integers(1, 6)), int(random.integers(1, 4))
    factor = between(1.5, 4.0)(random)
    search_factor = between(factor, 64.0)(random)
    arguments = [initial, period, factor, search_factor, search, low, high]
    expected = [initial, low, high, period, factor, search_factor, search]
    return _policy(
        loss_scales.SearchingLossScale, arguments, ExpectedSearching, expected
    )


def log_max(random):
    low, high = one_of(1.0, 2.0**-14)(random), one_of(2.0**14, 2.0**24)(random)
    expected = [
        low,
        high,
        between(3.0, 16.0)(random),
        between(0.1, 0.99)(random),
        between(0.1, 0.999)(random),
        one_of(3.09, 0.0)(random),
        one_of(False, True)(random),
    ]
    names = ["scale_min", "scale_max", "log_max", "beta1", "beta2"]
    names += ["overflow_std_dev", "original_overflow"]
    options = dict(zip(names, expected, strict=True))
    return _policy(loss_scales.LogMaxLossScale, [], ExpectedMaximum, expected, options)


def _within(random):
    low, high = BOUNDS(random)
    return min(max(SCALES(random), low), high), low, high


def _policy(cls, arguments, model, expected, options=None):
    options = options or {}
    return Policy(
        lambda: cls(*arguments, **options),
        lambda: model(*expected),
        f"{cls.__name__}(*{arguments}, **{options})",
    )
