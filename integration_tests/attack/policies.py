"""Loss-scale policies with random arguments, and what each does, in NumPy."""

import dataclasses

import numpy as np

import keras_lso
from integration_tests.attack.optimizers import between, one_of
from keras_lso import loss_scales

F32 = np.float32


@dataclasses.dataclass
class Policy:
    """A policy that can be made again and again; `wrap` makes an optimizer of it."""

    wrap: object
    expected: object
    words: str

    def __repr__(self):
        return self.words


class Expected:
    """What all models are: the scale, and a counter of steps."""

    needs_amax = False
    # How far the logarithm of the scale may be off.
    tolerance = 0.0

    def __init__(self, initial, low, high):
        self.scale, self.low, self.high = F32(initial), F32(low), F32(high)
        self.counter = 0

    def step(self, finite, amax):
        """Leaves the scale as it is."""


class ExpectedDynamic(Expected):
    """The docstring of `DynamicLossScale`, in the float32 in which scales are."""

    def __init__(
        self,
        initial,
        low,
        high,
        period,
        growth,
        backoff,
        hysteresis=1,
        refills_at_good_steps=False,
    ):
        super().__init__(initial, low, high)
        self.period, self.growth, self.backoff = period, F32(growth), F32(backoff)
        self.hysteresis = self.left = hysteresis
        self.refills_at_good_steps = refills_at_good_steps

    def step(self, finite, amax):
        factor = F32(1)
        if finite:
            self.counter += 1
            if self.counter == self.period:
                self.counter, factor, self.left = 0, self.growth, self.hysteresis
            if self.refills_at_good_steps:
                self.left = self.hysteresis
        else:
            self.counter = 0
            self.left = max(self.left - 1, 0)
            factor = F32(1) if self.left else self.backoff
        with np.errstate(over="ignore", under="ignore"):
            self.scale = np.clip(self.scale * factor, self.low, self.high)


class ExpectedLogMax(Expected):
    """The docstring of `LogMaxLossScale`, in float64: moments and bias correction."""

    needs_amax = True

    def __init__(self, low, high, log_max, beta1, beta2, deviations, original):
        super().__init__(min(max(1.0, low), high), low, high)
        self.betas, self.deviations = (beta1, beta2), deviations
        self.overflow = 2.0**log_max if original else log_max
        self.largest = 16.0
        # Of x, x and x**2, without their bias correction.
        self.averages = [0.0, 0.0, 0.0]

    def step(self, finite, amax):
        if finite and amax == 0:
            return
        self.counter += 1
        # XLA takes what is below the smallest normal number for 0.
        x = np.log2(np.fmax(amax, 2.0**-126)) if finite else self.overflow
        beta1, beta2 = self.betas
        weights = [(beta1, x), (beta2, x), (beta2, x * x)]
        self.averages = [
            beta * average + (1 - beta) * new
            for average, (beta, new) in zip(self.averages, weights, strict=True)
        ]
        mean, slow, square = (
            average / (1 - beta**self.counter)
            for average, (beta, _) in zip(self.averages, weights, strict=True)
        )
        sigma = np.sqrt(max(square - slow**2, 0.0))
        with np.errstate(over="ignore", under="ignore"):
            scale = np.exp2(16.0 - (mean + self.deviations * sigma))
        self.scale = np.clip(F32(min(scale, 3e38)), self.low, self.high)
        self.largest = max(self.largest, abs(x))
        # Float32 has 24 binary digits, of which some steps lose a few; the spread is
        # a difference here, in which float64 loses half of its 53.
        self.tolerance = 1e-5 * self.largest * (1 + self.deviations)
        # In float32 a spread of 0 may be the root of a rounding.
        self.tolerance += 5e-4 * self.largest * self.deviations


SCALES = one_of(1.0, 8.0, 1000.0, 2.0**15, 0.125, 2.0**-14, 3e-3, 1e6)
BOUNDS = one_of((2.0**-14, 2.0**24), (1.0, 2.0**15), (0.3, 1e9), (3.0, 3.0))


def policy(random):
    kinds = dynamic, dynamic, fixed, log_max, guarded
    return one_of(*kinds)(random)(random)


def guarded(random):
    return Policy(
        keras_lso.GuardedOptimizer, lambda: Expected(1, 1, 1), "GuardedOptimizer"
    )


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
    return _policy(loss_scales.LogMaxLossScale, [], ExpectedLogMax, expected, options)


def _within(random):
    low, high = BOUNDS(random)
    return min(max(SCALES(random), low), high), low, high


def _policy(cls, arguments, model, expected, options=None):
    options = options or {}
    return Policy(
        lambda inner, **told: keras_lso.LossScaleOptimizer(
            inner, loss_scale=cls(*arguments, **options), **told
        ),
        lambda: model(*expected),
        f"{cls.__name__}(*{arguments}, **{options})",
    )
