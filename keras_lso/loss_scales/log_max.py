"""`LogMaxLossScale`: a loss scale from a model of the largest gradient."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import ops

from keras_lso._backend.types import Tensor
from keras_lso._core.checks import check_bounds
from keras_lso._core.fields import (
    Fraction,
    Rate,
    Real,
    Scale,
    check_fields,
    registered,
)
from keras_lso.loss_scales.loss_scale import LossScale, float32

# Float16 ends just below 2**16.
_LOG_LIMIT = 16.0
_LARGEST_ORIGINAL = 64.0
_SMALLEST_NORMAL = float(np.finfo("float32").tiny)


@registered("LogMaxLossScale")
@dataclass(eq=False, repr=False)
class LogMaxLossScale(LossScale):
    """A loss scale from a model of the gradients' largest magnitude.

    The model is that the logarithm of the largest magnitude is normally distributed.
    `LogMaxLossScale` tracks its mean and spread from step to step. It chooses the scale
    that puts `2**16`, where float16 ends, `overflow_std_dev` standard deviations above
    the mean. The scale therefore needs no overflow to find its height.

    ```python
    x = log2(amax) if finite else log_max       # amax: of the unscaled gradients
    mean = average(x, beta1)
    sigma = sqrt(average(x**2, beta2) - average(x, beta2) ** 2)
    scale = 2 ** (16 - (mean + overflow_std_dev * sigma))
    scale = min(max(scale, scale_min), scale_max)
    ```

    `average` is the moving average with bias correction, as in Adam. Before the
    first step the scale is 1. A step whose gradients are all zero has no logarithm
    and leaves the state unchanged.

    This class comes from OpenSeq2Seq. OpenSeq2Seq sets the `x` of an overflow to
    `2**log_max` instead of the logarithm, which means a magnitude of `2**65536`. One
    overflow then keeps the scale at its lowest for thousands of steps.
    `original_overflow=True` reproduces this.

    The scale is generally not a power of two, so scaling and unscaling round the
    gradients, by 1e-7 at most. By default the scale never falls below 1: gradients
    above `2**16` need a lower `scale_min`.

    Args:
        scale_min: The lower bound of the scale. Defaults to `1.0`.
        scale_max: The upper bound of the scale. Defaults to `2**14`.
        log_max: The logarithm (base 2) to use as the largest magnitude of a step that
            overflows. Defaults to `16.0`.
        beta1: Between 0 and 1. The decay of the mean. Defaults to `0.99`.
        beta2: Between 0 and 1. The decay of the averages behind the spread. Defaults to
            `0.999`.
        overflow_std_dev: Zero or more. The distance, in standard deviations, from the
            mean to the end of float16. Defaults to `3.09`: one step in a thousand
            overflows if the distribution is normal.
        original_overflow: Whether to treat an overflow as OpenSeq2Seq does. Defaults to
            `False`.

    Raises:
        ValueError, TypeError: If an argument is not valid.

    Example:

    >>> import keras_lso
    >>> policy = keras_lso.loss_scales.LogMaxLossScale()
    >>> policy.build()
    >>> scales = [float(policy())]
    >>> for amax in [64.0, 64.0, 128.0]:
    ...     policy.step(finite=True, amax=keras.ops.array(amax))
    ...     scales.append(float(policy()))
    >>> [round(scale, 1) for scale in scales]
    [1.0, 1024.0, 1024.0, 295.4]

    Reference:

    - [OpenSeq2Seq, Mixed Precision Training](
        https://nvidia.github.io/OpenSeq2Seq/html/mixed-precision.html)
    """

    needs_amax = True

    scale_min: Scale = 1.0
    scale_max: Scale = 2.0**14
    log_max: Real = 16.0
    beta1: Fraction = 0.99
    beta2: Fraction = 0.999
    overflow_std_dev: Rate = 3.09
    original_overflow: bool = False

    _omitted = ("original_overflow",)

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self.scale_min, self.scale_max, ("scale_min", "scale_max"))
        self.min_scale: float = self.scale_min
        self.max_scale: float = self.scale_max
        # 1.0 where the bounds allow it.
        self.initial_loss_scale: float = min(max(1.0, self.min_scale), self.max_scale)
        if self.original_overflow and self.log_max >= _LARGEST_ORIGINAL:
            raise ValueError(
                "With `original_overflow=True` an overflow counts as 2**log_max, so "
                f"log_max must be below {_LARGEST_ORIGINAL}: float32 cannot hold the "
                f"square otherwise. Received: log_max={self.log_max!r}"
            )

    def build(self, add_variable: Callable[..., keras.Variable] | None = None) -> None:
        if self.built:
            return
        super().build(add_variable)
        self.mean: keras.Variable = self.add_variable("log_max_mean", 0.0)
        self.slow_mean: keras.Variable = self.add_variable("log_max_slow_mean", 0.0)
        self.variance: keras.Variable = self.add_variable("log_max_variance", 0.0)

    def step(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> None:
        """Moves the scale after a step.

        Args:
            finite: Boolean scalar (tensor). Whether every gradient was finite.
            amax: Float32 scalar tensor. The largest magnitude among the unscaled
                gradients. It is ignored if a gradient is not finite.
        """
        if amax is None:
            raise ValueError(
                "LogMaxLossScale needs the largest magnitude of the gradients. Call "
                "`step(finite, amax)`, or let `update(gradients)` find both. Received: "
                "amax=None"
            )
        amax = float32(amax)
        finite = ops.logical_and(finite, ops.isfinite(amax))
        observed = ops.logical_or(ops.logical_not(finite), amax > 0)
        overflow = 2.0**self.log_max if self.original_overflow else self.log_max
        # `where` computes both branches, so keep zero and NaN out of the logarithm.
        magnitude = ops.where(ops.logical_and(finite, observed), amax, float32(1))
        magnitude = ops.maximum(magnitude, float32(_SMALLEST_NORMAL))
        x = ops.where(finite, ops.log2(magnitude), float32(overflow))

        count = ops.convert_to_tensor(self.step_counter) + 1
        mean = _moved(self.mean, x, _share(self.beta1, count))
        # The spread about a moving mean is E[x**2] - E[x]**2, without its cancellation.
        share = _share(self.beta2, count)
        away = ops.square(x - ops.convert_to_tensor(self.slow_mean))
        variance = ops.convert_to_tensor(self.variance)
        variance = (1 - share) * (variance + share * away)
        slow_mean = _moved(self.slow_mean, x, share)

        cutoff = mean + self.overflow_std_dev * ops.sqrt(variance)
        scale = ops.power(float32(2), _LOG_LIMIT - cutoff)
        self.assign_scale(ops.where(observed, scale, self.value))
        for variable, new in (
            (self.step_counter, count),
            (self.mean, mean),
            (self.slow_mean, slow_mean),
            (self.variance, variance),
        ):
            variable.assign(ops.where(observed, new, ops.convert_to_tensor(variable)))

    def restore(self) -> None:
        super().restore()
        state = [self.step_counter, self.mean, self.slow_mean, self.variance]
        values = [float(ops.convert_to_numpy(v)) for v in state]
        count, variance = values[0], values[-1]
        if count < 0 or variance < 0 or not all(map(math.isfinite, values)):
            for variable in state:
                variable.assign(0)


def _share(beta, count):
    """Returns the weight of the last of `count` values in their moving average."""
    # `(1 - beta) / (1 - beta**count)` is equivalent to Adam's bias correction. It is 1
    # for the first value, so the average needs no later correction.
    # In float32 `1 - beta**count` would keep three digits at the first steps.
    corrected = -ops.expm1(ops.cast(count, "float32") * math.log(beta))
    # Rounding must not take the weight above 1: variances would become negative. The
    # weight of the first value is exactly 1, since one value has no spread: with 6e-8
    # less, a first value of 2**-16 would have a spread of 0.004.
    share = ops.minimum((1 - beta) / corrected, float32(1))
    return ops.where(count == 1, float32(1), share)


def _moved(average, x, share):
    average = ops.convert_to_tensor(average)
    return average + share * (x - average)
