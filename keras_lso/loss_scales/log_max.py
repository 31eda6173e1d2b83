"""`LogMaxLossScale`: a loss scale from a model of the largest gradient."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import ops

from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import check_bounds, refusal
from keras_lso._core.fields import Fraction, Rate, Real, Scale, check_fields, registered
from keras_lso.loss_scales.loss_scale import LossScale, float32

_SMALLEST_NORMAL = float(np.finfo("float32").tiny)


@registered("LogMaxLossScale")
@dataclass(eq=False, repr=False)
class LogMaxLossScale(LossScale):
    """A loss scale from a model of the gradients' largest magnitude.

    The model: the logarithm of the largest magnitude is normally distributed. The scale
    puts `2**16`, where float16 ends, `overflow_std_dev` standard deviations above the
    mean, and so needs no overflow to find its height.

    ```python
    x = log2(amax) if finite else log_max       # amax: of the unscaled gradients
    mean = average(x, beta1)
    sigma = sqrt(average(x**2, beta2) - average(x, beta2) ** 2)
    scale = 2 ** (16 - (mean + overflow_std_dev * sigma))
    scale = min(max(scale, scale_min), scale_max)
    ```

    `average` is the moving average with bias correction, as in Adam. Before the first
    step the scale is 1. A step whose gradients are all zero changes nothing. The scale
    is generally not a power of two, so it rounds the gradients, by 1e-7 at most.

    Args:
        scale_min: The lower bound of the scale. Defaults to `1.0`, which is too high
            for gradients above `2**16`.
        scale_max: The upper bound of the scale. Defaults to `2**14`.
        log_max: The `x` of a step that overflows. Defaults to `16.0`.
        beta1: Between 0 and 1. The decay of the mean. Defaults to `0.99`.
        beta2: Between 0 and 1. The decay of the spread. Defaults to `0.999`.
        overflow_std_dev: Zero or more. Defaults to `3.09`: if the distribution is
            normal, one step in a thousand overflows.
        original_overflow: Whether the `x` of an overflow is `2**log_max`, as in
            OpenSeq2Seq: one overflow then keeps the scale at its lowest for thousands
            of steps. Defaults to `False`.

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

    - [OpenSeq2Seq](https://nvidia.github.io/OpenSeq2Seq/html/mixed-precision.html)
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
        if self.original_overflow and self.log_max >= 64:
            # Float32 must hold the square of the `x` of an overflow, 2**log_max.
            requirement = "be below 64 if `original_overflow` is True"
            raise refusal("log_max", self.log_max, requirement)

    def build(self, add_variable: Callable[..., keras.Variable] | None = None) -> None:
        if self.built:
            return
        super().build(add_variable)
        self.mean: keras.Variable = self.add_variable("log_max_mean", 0.0)
        self.slow_mean: keras.Variable = self.add_variable("log_max_slow_mean", 0.0)
        self.variance: keras.Variable = self.add_variable("log_max_variance", 0.0)
        self._model = [self.step_counter, self.mean, self.slow_mean, self.variance]

    def step(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> None:
        if amax is None:
            raise ValueError(
                "LogMaxLossScale needs the largest magnitude of the gradients, `amax`. "
                "Let `update(gradients)` find it. Received: amax=None"
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
        scale = ops.power(float32(2), 16.0 - cutoff)
        self.assign_scale(ops.where(observed, scale, self.value))
        moved = (count, mean, slow_mean, variance)
        for variable, new in zip(self._model, moved, strict=True):
            variable.assign(ops.where(observed, new, ops.convert_to_tensor(variable)))

    def restore(self) -> None:
        super().restore()
        values = [float(ops.convert_to_numpy(v)) for v in self._model]
        count, *_, variance = values
        if count < 0 or variance < 0 or not np.isfinite(values).all():
            for variable in self._model:
                variable.assign(0)


def _share(beta: float, count: Tensor) -> Tensor:
    """Returns the weight of the last of `count` values in their moving average."""
    # `(1 - beta) / (1 - beta**count)` is equivalent to Adam's bias correction. It is 1
    # for the first value, so the average needs no later correction.
    # In float32 `1 - beta**count` would keep three digits at the first steps.
    corrected = -ops.expm1(ops.cast(count, "float32") * math.log(beta))
    # Above 1 it would make variances negative. The first weight is exactly 1: with 6e-8
    # less, a first value of 2**-16 would have a spread of 0.004.
    share = ops.minimum((1 - beta) / corrected, float32(1))
    return ops.where(count == 1, float32(1), share)


def _moved(average: keras.Variable, x: Tensor, share: Tensor) -> Tensor:
    """Returns a moving average after a value with this share."""
    average = ops.convert_to_tensor(average)
    return average + share * (x - average)
