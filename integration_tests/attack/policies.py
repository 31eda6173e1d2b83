"""Loss-scale policies with any arguments, and a model of each in NumPy."""

import numpy as np
from hypothesis import strategies as st

from keras_lso import loss_scales

F32 = np.float32


def between(low, high):
    """Numbers in even steps, of which `low` is the simplest."""
    return st.integers(0, 1000).map(lambda n: low + (high - low) * n / 1000)


SCALES = st.sampled_from([1.0, 8.0, 1000.0, 2.0**15, 0.125, 2.0**-14, 3e-3, 1e6])
BOUNDS = st.sampled_from([(2.0**-14, 2.0**24), (1.0, 2.0**15), (0.3, 1e9), (3.0, 3.0)])


@st.composite
def _dynamic(draw):
    low, high = draw(BOUNDS)
    return loss_scales.DynamicLossScale(
        initial_loss_scale=min(max(draw(SCALES), low), high),
        increment_period=draw(st.integers(1, 4)),
        growth_factor=draw(between(1.001, 4.0)),
        backoff_factor=draw(between(1e-3, 0.99)),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(st.integers(1, 3)),
        consecutive_hysteresis=draw(st.booleans()),
    )


_LOG_MAX = st.builds(
    loss_scales.LogMaxLossScale,
    scale_min=st.sampled_from([1.0, 2.0**-14]),
    scale_max=st.sampled_from([2.0**14, 2.0**24]),
    log_max=between(3.0, 16.0),
    beta1=between(0.1, 0.99),
    beta2=between(0.1, 0.999),
    overflow_std_dev=st.sampled_from([3.09, 0.0]),
    original_overflow=st.booleans(),
)
# None is a `GuardedOptimizer`, which has no scale.
POLICIES = st.one_of(
    st.none(), SCALES.map(loss_scales.FixedLossScale), _LOG_MAX, _dynamic(), _dynamic()
)


class FixedModel:
    """The scale, and the counter of steps of a policy that counts them."""

    needs_amax = False
    # How far the logarithm of the scale may be off.
    tolerance = 0.0

    def __init__(self, policy):
        self.policy, self.counter = policy, 0
        names = "initial_loss_scale", "min_scale", "max_scale"
        scales = [F32(getattr(policy, name, 1.0)) for name in names]
        self.scale, self.low, self.high = scales

    def step(self, finite, amax):
        """Leaves the scale as it is."""


class DynamicModel(FixedModel):
    """The docstring of `DynamicLossScale`, in the float32 in which scales are."""

    def __init__(self, policy):
        super().__init__(policy)
        self.left = policy.hysteresis

    def step(self, finite, amax):
        policy, factor = self.policy, F32(1)
        if finite:
            self.counter += 1
            if self.counter == policy.increment_period:
                self.counter, factor = 0, F32(policy.growth_factor)
                self.left = policy.hysteresis
            if policy.consecutive_hysteresis:
                self.left = policy.hysteresis
        else:
            self.counter = 0
            self.left = max(self.left - 1, 0)
            factor = F32(1) if self.left else F32(policy.backoff_factor)
        with np.errstate(over="ignore", under="ignore"):
            self.scale = np.clip(self.scale * factor, self.low, self.high)


class LogMaxModel(FixedModel):
    """The docstring of `LogMaxLossScale`, in float64: moments and bias correction."""

    needs_amax = True

    def __init__(self, policy):
        super().__init__(policy)
        original = policy.original_overflow
        self.overflow = 2.0**policy.log_max if original else policy.log_max
        self.largest = 16.0
        # Of x, x and x**2, without their bias correction.
        self.averages = [0.0, 0.0, 0.0]

    def step(self, finite, amax):
        if finite and amax == 0:
            return
        self.counter += 1
        # XLA takes what is below the smallest normal number for 0.
        x = np.log2(np.fmax(amax, 2.0**-126)) if finite else self.overflow
        beta1, beta2 = self.policy.beta1, self.policy.beta2
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
        deviations = self.policy.overflow_std_dev
        with np.errstate(over="ignore", under="ignore"):
            scale = np.exp2(16.0 - (mean + deviations * sigma))
        self.scale = np.clip(F32(min(scale, 3e38)), self.low, self.high)
        self.largest = max(self.largest, abs(x))
        # Float32 has 24 binary digits, of which some steps lose a few; the spread is
        # a difference here, in which float64 loses half of its 53.
        self.tolerance = 1e-5 * self.largest * (1 + deviations)
        # In float32 a spread of 0 may be the root of a rounding.
        self.tolerance += 5e-4 * self.largest * deviations


def model_of(policy):
    """Returns the model of a policy, or of none."""
    models = {
        loss_scales.DynamicLossScale: DynamicModel,
        loss_scales.LogMaxLossScale: LogMaxModel,
    }
    return models.get(type(policy), FixedModel)(policy)
