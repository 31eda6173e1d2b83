"""Loss-scale policies with any arguments, and what each does, in NumPy."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from keras_lso import loss_scales
from keras_lso.compat.open_seq2seq import AutomaticLossScaler

F32 = np.float32


@dataclasses.dataclass
class Policy:
    """A policy that can be made again and again.

    Args:
        make: Callable that returns a `keras_lso.loss_scales.LossScale`.
        expected: Callable that returns its model.
    """

    make: object
    expected: object
    words: str

    def __repr__(self):
        return self.words


class Expected:
    """What all models are: the scale, and a counter of steps.

    Args:
        initial: Float. The scale of the first step.
        low: Float. The lowest scale.
        high: Float. The highest scale.
    """

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
        x = np.log2(np.float64(amax)) if finite else self.overflow
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


SCALES = st.sampled_from([1.0, 8.0, 1000.0, 2.0**15, 0.125, 2.0**-14, 3e-3, 1e10])
BOUNDS = st.sampled_from([(2.0**-14, 2.0**24), (1.0, 2.0**15), (0.3, 1e30), (3.0, 3.0)])


@st.composite
def fixed(draw):
    value = draw(SCALES)
    return Policy(
        lambda: loss_scales.FixedLossScale(value),
        lambda: Expected(value, value, value),
        f"FixedLossScale({value})",
    )


@st.composite
def dynamic(draw):
    low, high = draw(BOUNDS)
    initial = min(max(draw(SCALES), low), high)
    multiplier = draw(st.sampled_from([2.0, 2.0, 1.5, 10.0]))
    growth = draw(st.sampled_from([None, None, 1.001, 4.0]))
    backoff = draw(st.sampled_from([None, None, 0.7, 0.25, 1e-6]))
    period = draw(st.integers(1, 4))
    hysteresis = draw(st.sampled_from([1, 1, 2, 3]))
    refills = draw(st.booleans())
    arguments = dict(
        initial_loss_scale=initial,
        increment_period=period,
        multiplier=multiplier,
        growth_factor=growth,
        backoff_factor=backoff,
        min_scale=low,
        max_scale=high,
        hysteresis=hysteresis,
        consecutive_hysteresis=refills,
    )
    return Policy(
        lambda: loss_scales.DynamicLossScale(**arguments),
        lambda: ExpectedDynamic(
            initial,
            low,
            high,
            period,
            growth or multiplier,
            backoff or 1 / multiplier,
            hysteresis,
            refills,
        ),
        f"DynamicLossScale({arguments})",
    )


LOG_MAX = st.fixed_dictionaries(
    {
        "scale_max": st.sampled_from([2.0**14, 2.0**24]),
        "scale_min": st.sampled_from([1.0, 2.0**-14]),
        "log_max": st.sampled_from([16.0, 3.5]),
        "beta1": st.sampled_from([0.99, 0.5]),
        "beta2": st.sampled_from([0.999, 0.75]),
        "overflow_std_dev": st.sampled_from([3.09, 0.0]),
    }
)


def _expected_log_max(arguments, original):
    return ExpectedLogMax(
        arguments["scale_min"],
        arguments["scale_max"],
        arguments["log_max"],
        arguments["beta1"],
        arguments["beta2"],
        arguments["overflow_std_dev"],
        original,
    )


@st.composite
def log_max(draw):
    arguments, original = draw(LOG_MAX), draw(st.booleans())
    return Policy(
        lambda: loss_scales.LogMaxLossScale(**arguments, original_overflow=original),
        lambda: _expected_log_max(arguments, original),
        f"LogMaxLossScale({arguments}, original_overflow={original})",
    )


@st.composite
def open_seq2seq(draw):
    """OpenSeq2Seq's names, with its defaults."""
    if draw(st.booleans()):
        arguments = draw(LOG_MAX)
        return Policy(
            lambda: AutomaticLossScaler("LogMax", arguments).policy,
            lambda: _expected_log_max(arguments, original=True),
            f"AutomaticLossScaler('LogMax', {arguments})",
        )
    factor, window = draw(st.sampled_from([2.0, 3.0])), draw(st.integers(1, 4))
    arguments = {"step_factor": factor, "step_window": window}
    return Policy(
        lambda: AutomaticLossScaler("Backoff", arguments).policy,
        lambda: ExpectedDynamic(2.0**14, 1.0, 2.0**14, window, factor, 1 / factor),
        f"AutomaticLossScaler('Backoff', {arguments})",
    )


ANY = dynamic() | dynamic() | fixed() | log_max() | open_seq2seq()
