"""OpenSeq2Seq's learning-rate policies as schedules."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import keras
from keras import ops

from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import (
    check_items,
    check_list,
    check_positive,
    check_rate,
    check_real,
    check_step,
    refusal,
)
from keras_lso._core.fields import Count, Length, Positive, Rate, Step, registered
from keras_lso.schedules._schedule import (
    Schedule,
    Steps,
    check_boundaries,
    elapsed,
    float32,
    half_cosine,
    one_minus_power,
    shares,
    stairs,
    warmed_up,
)


def _check_float_dtype(argument: str, value: Any) -> str:
    """Returns the name of a float dtype, which may be NumPy's or a framework's."""
    with contextlib.suppress(TypeError, ValueError):
        if value is not None and keras.backend.is_float_dtype(value):
            return keras.backend.standardize_dtype(value)
    raise refusal(argument, value, "be a dtype of floats such as 'float32'")


def _check_power(argument: str, value: Any) -> float:
    """Returns `value` as a positive float; raises a `TypeError` if it is no number."""
    return check_positive(argument, check_real(argument, value))


Dtype = Annotated[str, _check_float_dtype]
Power = Annotated[float, _check_power]


@registered("PiecewiseConstant")
@dataclass(eq=False)
class PiecewiseConstant(Schedule):
    """OpenSeq2Seq's `piecewise_constant`: multiples of a rate, one after the other.

    ```python
    if step <= boundaries[0]: rate = learning_rate
    elif step <= boundaries[1]: rate = learning_rate * decay_rates[0]
    ...
    else: rate = learning_rate * decay_rates[-1]
    ```

    Args:
        learning_rate: The initial rate.
        boundaries: Strictly increasing. The last step of each interval but the last;
            with `steps_per_epoch` epochs, ints or floats, rounded down to whole steps.
        decay_rates: After each boundary, the factor that multiplies the initial rate.
        steps_per_epoch: Positive. Defaults to `None`: the boundaries are steps.
        name: Defaults to `"PiecewiseConstant"`.

    Example:

    >>> from keras_lso.compat.open_seq2seq import PiecewiseConstant
    >>> schedule = PiecewiseConstant(0.8, [1, 2.5], [0.5, 0.125], steps_per_epoch=2)
    >>> [f"{float(schedule(step)):.1f}" for step in range(8)]
    ['0.8', '0.8', '0.8', '0.4', '0.4', '0.4', '0.1', '0.1']
    """

    learning_rate: Rate
    boundaries: Annotated[Sequence[float], check_list]
    decay_rates: Sequence[Rate]
    steps_per_epoch: Count | None = None
    name: str = "PiecewiseConstant"

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = check_list("decay_rates", self.decay_rates, at_least=1)
        check = check_step if self.steps_per_epoch is None else check_rate
        self.boundaries = check_items(check, "boundaries", self.boundaries)
        # Without the inner rounding 0.29 * 100 would be 28 steps, not 29.
        length = self.steps_per_epoch or 1
        steps = [math.floor(round(each * length, 6)) for each in self.boundaries]
        try:
            self._steps = check_items(check_step, "boundaries", steps)
            check_boundaries(steps, len(rates), "as many as `decay_rates`")
        except ValueError as error:
            if self.steps_per_epoch is None:
                raise
            raise ValueError(f"{error}, with {length} steps per epoch") from None
        rates = [self.learning_rate * rate for rate in rates]
        rates = check_items(check_rate, "learning_rate * decay_rates", rates)
        self._values = [self.learning_rate, *rates]

    def __call__(self, step: int | Tensor) -> Tensor:
        return stairs(_whole(step).whole, self._steps, self._values)


def _whole(step: int | Tensor) -> Steps:
    """Returns the `Steps` of a step, zero or more, rounded down."""
    return Steps(ops.maximum(elapsed(step).whole, 0))


@registered("TransformerPolicy")
@dataclass(eq=False)
class TransformerPolicy(Schedule):
    """OpenSeq2Seq's `transformer_policy`: a linear warm-up, then an inverse root.

    ```python
    step = step + 1
    rate = coefficient * d_model**-0.5 * min(step * warmup_steps**-1.5, step**-0.5)
    rate = min(learning_rate * rate, max_lr)
    ```

    This is the schedule of the Transformer, also called "Noam", with a cap.

    Args:
        learning_rate: A factor of the rate.
        d_model: Positive. The width of the model.
        warmup_steps: Positive. The number of steps of the linear warm-up.
        max_lr: The cap. Defaults to `None`: no cap.
        coefficient: Another factor (0.002 for Adam in OpenSeq2Seq). Defaults to `1.0`.
        dtype: That of the rate, computed in float32. Defaults to `"float32"`.
        name: Defaults to `"TransformerPolicy"`.

    Example:

    >>> from keras_lso.compat.open_seq2seq import TransformerPolicy
    >>> schedule = TransformerPolicy(2.0, d_model=16, warmup_steps=4, max_lr=0.23)
    >>> [f"{float(schedule(step)):.4f}" for step in (0, 1, 2, 3, 4, 8, 15)]
    ['0.0625', '0.1250', '0.1875', '0.2300', '0.2236', '0.1667', '0.1250']

    Reference:

    - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    """

    learning_rate: Rate
    d_model: Count
    warmup_steps: Count
    max_lr: Rate | None = None
    coefficient: Rate = 1.0
    dtype: Dtype = "float32"
    name: str = "TransformerPolicy"

    def __call__(self, step: int | Tensor) -> Tensor:
        count = _whole(step).since(-1).in_float32()
        scale = self.learning_rate * self.coefficient * self.d_model**-0.5
        rate = ops.minimum(
            count * (scale * self.warmup_steps**-1.5), scale / ops.sqrt(count)
        )
        if self.max_lr is not None:
            rate = ops.minimum(rate, float32(self.max_lr))
        return ops.cast(rate, self.dtype)


@dataclass(eq=False)
class _Decay(Schedule):
    """Base class of schedules with a warm-up and a decay from a given step on."""

    learning_rate: Rate
    decay_steps: Length

    # Fields of the subclasses, but `ExpDecay` has no warm-up.
    begin_decay_at = warmup_steps = 0
    # Returns the rate after some `Steps` of the decay, at least one.
    _decayed: ClassVar[Callable[..., Tensor]]

    def __call__(self, step: int | Tensor) -> Tensor:
        steps = _whole(step)
        full = self.learning_rate
        rate = warmed_up(steps, self.warmup_steps, 0.0, full, float32(full))
        decaying = steps.whole - self._begin()
        decayed = self._decayed(rate, Steps(ops.maximum(decaying, 1)))
        return ops.where(decaying > 0, decayed, rate)

    def _begin(self) -> int:
        """Returns the first step of the decay."""
        return self.begin_decay_at


@registered("ExpDecay")
@dataclass(eq=False)
class ExpDecay(_Decay):
    """OpenSeq2Seq's `exp_decay`: an exponential decay to a minimum, after a delay.

    ```python
    exponent = max(step - begin_decay_at, 0) / decay_steps  # Rounded down for stairs.
    rate = max(learning_rate * decay_rate ** exponent, min_lr)
    ```

    Args:
        learning_rate: The rate before the decay.
        decay_steps: Positive. The number of steps (not epochs) of the decay.
        decay_rate: Positive. The factor by which the rate changes in `decay_steps`.
        use_staircase_decay: Whether the rate falls in stairs.
        begin_decay_at: Zero or more. The first step of the decay. Defaults to `0`.
        min_lr: The minimum. Defaults to `0.0`.
        name: Defaults to `"ExpDecay"`.

    Example:

    >>> from keras_lso.compat.open_seq2seq import ExpDecay
    >>> schedule = ExpDecay(0.8, 2, 0.25, True, begin_decay_at=2, min_lr=0.02)
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.800', '0.800', '0.800', '0.800', '0.200', '0.200', '0.050', '0.050', '0.020']
    """

    decay_rate: Positive
    use_staircase_decay: bool
    begin_decay_at: Step = 0
    min_lr: Rate = 0.0
    name: str = "ExpDecay"

    def __call__(self, step: int | Tensor) -> Tensor:
        return ops.maximum(super().__call__(step), float32(self.min_lr))

    def _decayed(self, rate: Tensor, steps: Steps) -> Tensor:
        if self.use_staircase_decay:
            exponent = ops.cast(steps.whole // self.decay_steps, "float32")
        else:
            exponent = steps.in_float32() / self.decay_steps
        return rate * ops.exp(exponent * math.log(self.decay_rate))


@dataclass(eq=False)
class _WarmedUpDecay(_Decay):
    """Base class of the decays with a warm-up and a power."""

    power: Power = 1.0
    begin_decay_at: Step = 0
    min_lr: Rate = 0.0
    warmup_steps: Step = 0
    name: str | None = None


@registered("PolyDecay")
@dataclass(eq=False)
class PolyDecay(_WarmedUpDecay):
    """OpenSeq2Seq's `poly_decay`: a power to a minimum, after a warm-up and a delay.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    step = clip(step - begin_decay_at, 0, decay_steps)
    left = (1 - step / decay_steps) ** power
    rate = rate * left + min_lr * (1 - left)
    ```

    The decay starts at `begin_decay_at` even if the warm-up takes longer. To decay only
    after the warm-up, write `begin_decay_at=warmup_steps`.

    Args:
        learning_rate: The rate before the decay.
        decay_steps: Positive. The number of steps (not epochs) of the decay.
        power: Positive. Defaults to `1.0`: a straight line.
        begin_decay_at: Zero or more. The first step of the decay. Defaults to `0`.
        min_lr: The rate after the decay. Defaults to `0.0`.
        warmup_steps: The steps (not epochs) of the warm-up. Defaults to `0`: none.
        name: Defaults to `None`: that of the class.

    Example:

    >>> from keras_lso.compat.open_seq2seq import PolyDecay
    >>> schedule = PolyDecay(0.8, 4, 2.0, begin_decay_at=3, min_lr=0.1, warmup_steps=2)
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.000', '0.400', '0.800', '0.800', '0.494', '0.275', '0.144', '0.100', '0.100']
    """

    def _decayed(self, rate: Tensor, steps: Steps) -> Tensor:
        left, done = shares(*steps.left_and_done(self.decay_steps))
        share_done = one_minus_power(left, done, self.power)
        return rate * ops.power(left, float32(self.power)) + self.min_lr * share_done


@registered("InvPolyDecay")
@dataclass(eq=False)
class InvPolyDecay(_Decay):
    """OpenSeq2Seq's `inv_poly_decay`: one over a power of the steps, to a minimum.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    step = clip(step - max(warmup_steps, begin_decay_at), 0, decay_steps)
    k = ((learning_rate / min_lr) ** (1 / power) - 1) / decay_steps
    rate = rate / (1 + k * step) ** power
    ```

    This follows OpenSeq2Seq's documentation; its code continues below `min_lr`, and
    ignores `begin_decay_at` and `warmup_steps`.

    Args:
        learning_rate: The rate before the decay.
        decay_steps: Positive. The number of steps (not epochs) of the decay.
        min_lr: The rate after the decay. Below 1e-8 it counts as 1e-8, above
            `learning_rate` as `learning_rate`.
        power: Positive. Defaults to `1.0`.
        begin_decay_at: Zero or more. The first step of the decay, unless the warm-up
            ends later. Defaults to `0`.
        warmup_steps: The steps (not epochs) of the warm-up. Defaults to `0`: none.
        name: Defaults to `"InvPolyDecay"`.

    Example:

    >>> from keras_lso.compat.open_seq2seq import InvPolyDecay
    >>> schedule = InvPolyDecay(0.8, 4, 0.2, begin_decay_at=3, warmup_steps=2)
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.000', '0.400', '0.800', '0.800', '0.457', '0.320', '0.246', '0.200', '0.200']
    """

    min_lr: Rate
    power: Power = 1.0
    begin_decay_at: Step = 0
    warmup_steps: Step = 0
    name: str = "InvPolyDecay"

    def _begin(self) -> int:
        return max(self.warmup_steps, self.begin_decay_at)

    def _decayed(self, rate: Tensor, steps: Steps) -> Tensor:
        # The warm-up is over: the rate is the learning rate.
        lowest = min(max(self.min_lr, 1e-8), self.learning_rate)
        ratio = self.learning_rate / lowest if lowest > 0 else 1.0
        # Beyond this limit, at powers near 0, `k` leaves float32's range.
        growth = min(math.log(ratio) / self.power, 80)
        left, done = shares(*steps.left_and_done(self.decay_steps))
        rate = self.learning_rate / ops.power(
            1 + math.expm1(growth) * done, float32(self.power)
        )
        return ops.where(left > 0, ops.maximum(rate, lowest), float32(lowest))


# Keras has a schedule of that name, which this class does not have in Python.
@registered("CosineDecay")
@dataclass(eq=False)
class CosineDecayPolicy(_WarmedUpDecay):
    """OpenSeq2Seq's `cosine_decay`: half a cosine, after a warm-up and a delay.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    step = clip(step - begin_decay_at, 0, decay_steps)
    cosine = (1 + cos(pi * step / decay_steps)) / 2
    rate = rate * ((1 - min_lr) * cosine + min_lr)
    ```

    As in `PolyDecay`, the decay may begin in the warm-up. In configs: `CosineDecay`.

    Args:
        learning_rate: The rate before the decay.
        decay_steps: Positive. The number of steps (not epochs) of the decay.
        power: Positive. Has no effect, as in OpenSeq2Seq. Defaults to `1.0`.
        begin_decay_at: Zero or more. The first step of the decay. Defaults to `0`.
        min_lr: The last rate as a fraction of `learning_rate`. Defaults to `0.0`.
        warmup_steps: The steps (not epochs) of the warm-up. Defaults to `0`: none.
        name: Defaults to `None`: that of the class.

    Example:

    >>> from keras_lso.compat.open_seq2seq import CosineDecayPolicy
    >>> schedule = CosineDecayPolicy(0.8, 4, begin_decay_at=2, min_lr=0.1)
    >>> [f"{float(schedule(step)):.3f}" for step in range(8)]
    ['0.800', '0.800', '0.800', '0.695', '0.440', '0.185', '0.080', '0.080']
    """

    def _decayed(self, rate: Tensor, steps: Steps) -> Tensor:
        left, done = shares(*steps.left_and_done(self.decay_steps))
        return rate * (half_cosine(left) + self.min_lr * half_cosine(done))
