"""OpenSeq2Seq's learning-rate policies that decay, after a warm-up and a delay.

They are apart from the schedules that do not decay, which are in `policies.py`.
"""

import math

from keras import ops

from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import (
    float32,
    half_cosine,
    one_minus_power,
    shares,
    warmed_up,
)
from keras_lso.schedules._declared import Schedule, declared, field
from keras_lso.schedules._powers import power_of_share, power_of_two
from keras_lso.schedules._renamed import renamed
from keras_lso.schedules._steps import Steps, whole

__getattr__ = renamed(__name__, CosineDecay="CosineDecayPolicy")


class _WaitingDecay(Schedule):
    """Base of the schedules: a warm-up, and a decay that begins at a later step.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    if step > begin: rate = decayed(rate, step - begin)
    ```
    """

    learning_rate: float
    decay_steps: int
    begin_decay_at: int
    min_lr: float
    name: str
    warmup_steps = 0

    @property
    def _begin(self):
        return self.begin_decay_at

    def __call__(self, step):
        step = whole(step)
        full = self.learning_rate
        rate = float32(full)
        if self.warmup_steps > 0:
            rate = warmed_up(Steps(step), self.warmup_steps, 0.0, full, rate)
        decaying = step - self._begin
        # `decayed` is defined from one step on; below that its result is unused.
        decayed = self.decayed(rate, ops.maximum(decaying, 1))
        return ops.where(decaying > 0, decayed, rate)

    def decayed(self, rate, step):
        """Returns a rate after a number of steps of the decay, one or more."""
        raise NotImplementedError


class _WarmedUpDecay(_WaitingDecay):
    """Base of the schedules whose decay ends after `decay_steps`."""

    power: float

    def left_and_done(self, step):
        """Returns the remaining and the completed steps of the decay."""
        done = ops.minimum(step, self.decay_steps)
        return self.decay_steps - done, done


def _shares(left, done):
    return shares(ops.cast(left, "float32"), ops.cast(done, "float32"))


@declared("ExpDecay")
class ExpDecay(_WaitingDecay):
    """OpenSeq2Seq's `exp_decay`: an exponential decay to a minimum, after a delay.

    ```python
    step = max(step - begin_decay_at, 0)
    exponent = step / decay_steps
    if use_staircase_decay:
        exponent = floor(exponent)
    rate = max(learning_rate * decay_rate ** exponent, min_lr)
    ```

    `min_lr` is a lower bound at all steps, the first ones included, and may be above
    `learning_rate`. Accurate to 1e-6 of the rate up to step 2**24.

    Args:
        use_staircase_decay: Bool. Whether the rate falls in stairs.
        min_lr: Float. The minimum.
        {{others}}

    Example:

    >>> from keras_lso.schedules import ExpDecay
    >>> smooth = ExpDecay(0.8, 2, 0.25, False, begin_decay_at=2, min_lr=0.02)
    >>> [f"{float(smooth(step)):.3f}" for step in range(9)]
    ['0.800', '0.800', '0.800', '0.400', '0.200', '0.100', '0.050', '0.025', '0.020']
    >>> stairs = ExpDecay(0.8, 2, 0.25, True, begin_decay_at=2, min_lr=0.02)
    >>> [f"{float(stairs(step)):.3f}" for step in range(9)]
    ['0.800', '0.800', '0.800', '0.800', '0.200', '0.200', '0.050', '0.050', '0.020']

    {{open_seq2seq}}
    """

    learning_rate: float = field(check.rate)
    decay_steps: int = field(check.some_steps)
    decay_rate: float = field(check.positive)
    use_staircase_decay: bool = field(check.boolean)
    begin_decay_at: int = field(check.step, default=0)
    min_lr: float = field(check.rate, default=0.0)
    name: str = field(check.name, default="ExpDecay")

    def __call__(self, step):
        return ops.maximum(super().__call__(step), float32(self.min_lr))

    def decayed(self, rate, step):
        halvings = math.log2(self.decay_rate)
        if self.use_staircase_decay:
            decay = power_of_two(step // self.decay_steps, halvings)
        else:
            decay = power_of_two(step, halvings / self.decay_steps)
        return rate * decay


@declared("PolyDecay")
class PolyDecay(_WarmedUpDecay):
    """OpenSeq2Seq's `poly_decay`: a power to a minimum, after a warm-up and a delay.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    if step >= begin_decay_at:
        step = min(step - begin_decay_at, decay_steps)
        left = (1 - step / decay_steps) ** power
        rate = rate * left + min_lr * (1 - left)
    ```

    {{overlap}}

    With a `min_lr` above `learning_rate` the rate rises to it. Accurate to 1e-6 of
    the rate for `decay_steps` of up to 2**24 and powers of up to 300.

    Args:
        power: Positive float. Defaults to `1.0`: a straight line.
        min_lr: Float. The rate after the decay.
        name: String. Defaults to `None`: that of the class.
        {{others}}

    Example:

    >>> from keras_lso.schedules import PolyDecay
    >>> schedule = PolyDecay(0.8, 4, 2.0, begin_decay_at=3, min_lr=0.1, warmup_steps=2)
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.000', '0.400', '0.800', '0.800', '0.494', '0.275', '0.144', '0.100', '0.100']

    {{open_seq2seq}}
    """

    learning_rate: float = field(check.rate)
    decay_steps: int = field(check.some_steps)
    power: float = field(check.positive_power, default=1.0)
    begin_decay_at: int = field(check.step, default=0)
    min_lr: float = field(check.rate, default=0.0)
    warmup_steps: int = field(check.step, default=0)
    name: str = field(check.name, default=None)

    def decayed(self, rate, step):
        left, done = self.left_and_done(step)
        share_left = power_of_share(left, 0.0, self.decay_steps, self.power)
        line_left, line_done = _shares(left, done)
        share_done = one_minus_power(line_left, line_done, self.power)
        return rate * share_left + self.min_lr * share_done


@declared("InvPolyDecay")
class InvPolyDecay(_WarmedUpDecay):
    """OpenSeq2Seq's `inv_poly_decay`: one over a power of the steps, to a minimum.

    ```python
    min_lr = clip(min_lr, 1e-8, learning_rate)
    k = ((learning_rate / min_lr) ** (1 / power) - 1) / decay_steps
    begin = max(warmup_steps, begin_decay_at)
    rate = learning_rate * min(1, step / warmup_steps)
    if step >= begin:
        rate = max(rate / (1 + k * (step - begin)) ** power, min_lr)
    ```

    From `decay_steps` steps after `begin` on the rate is `min_lr`. This is what
    OpenSeq2Seq documents; its code continues below `min_lr`, and ignores
    `begin_decay_at` and `warmup_steps`. Accurate to 1e-6 of the rate for powers of up
    to 300.

    Args:
        min_lr: Float. The rate after the decay. Below 1e-8 it counts as 1e-8, above
            `learning_rate` as `learning_rate`.
        power: Positive float. The larger, the more exponential the decay.
        begin_decay_at: Int of zero or more. The first step of the decay, if it is not
            before the end of the warm-up.
        {{others}}

    Example:

    >>> from keras_lso.schedules import InvPolyDecay
    >>> schedule = InvPolyDecay(0.8, 4, 0.2, begin_decay_at=3, warmup_steps=2)
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.000', '0.400', '0.800', '0.800', '0.457', '0.320', '0.246', '0.200', '0.200']

    {{open_seq2seq}}
    """

    learning_rate: float = field(check.rate)
    decay_steps: int = field(check.some_steps)
    min_lr: float = field(check.rate)
    power: float = field(check.positive_power, default=1.0)
    begin_decay_at: int = field(check.step, default=0)
    warmup_steps: int = field(check.step, default=0)
    name: str = field(check.name, default="InvPolyDecay")

    @property
    def _begin(self):
        return max(self.warmup_steps, self.begin_decay_at)

    def decayed(self, rate, step):
        # The warm-up is over: the rate is the learning rate.
        lowest = min(max(self.min_lr, 1e-8), self.learning_rate)
        if lowest == self.learning_rate:
            return float32(lowest)
        # With offset = 1 / k, relative to the end of the decay, where neither a large
        # nor a small k leaves float32's range:
        #   rate = lowest * ((step + offset) / (decay_steps + offset)) ** -power
        shrink = math.log(lowest / self.learning_rate) / self.power
        offset = self.decay_steps * math.exp(shrink) / -math.expm1(shrink)
        left, done = self.left_and_done(step)
        share = power_of_share(done, offset, self.decay_steps + offset, -self.power)
        rate = ops.clip(lowest * share, float32(lowest), float32(self.learning_rate))
        return ops.where(left > 0, rate, float32(lowest))


@declared("CosineDecay")
class CosineDecayPolicy(_WarmedUpDecay):
    """OpenSeq2Seq's `cosine_decay`: half a cosine, after a warm-up and a delay.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    if step >= begin_decay_at:
        step = min(step - begin_decay_at, decay_steps)
        cosine = (1 + cos(pi * step / decay_steps)) / 2
        rate = rate * ((1 - min_lr) * cosine + min_lr)
    ```

    {{overlap}}

    Note that `min_lr` is a fraction of the rate; above 1 the rate rises. Accurate to
    1e-6 of the rate for `decay_steps` of up to 2**24. Configs hold the class's former
    name, `CosineDecay`.

    Args:
        power: Positive float. Has no effect, as in OpenSeq2Seq.
        min_lr: Float. The rate after the decay, as a fraction of `learning_rate`.
        name: String. Defaults to `None`: that of the class.
        {{others}}

    Example:

    >>> from keras_lso.schedules import CosineDecayPolicy
    >>> schedule = CosineDecayPolicy(
    ...     0.8, 4, begin_decay_at=3, min_lr=0.1, warmup_steps=2
    ... )
    >>> [f"{float(schedule(step)):.3f}" for step in range(9)]
    ['0.000', '0.400', '0.800', '0.800', '0.695', '0.440', '0.185', '0.080', '0.080']

    {{open_seq2seq}}
    - [Loshchilov and Hutter, 2017, SGDR](https://arxiv.org/abs/1608.03983)
    """

    learning_rate: float = field(check.rate)
    decay_steps: int = field(check.some_steps)
    power: float = field(check.positive_power, default=1.0)
    begin_decay_at: int = field(check.step, default=0)
    min_lr: float = field(check.rate, default=0.0)
    warmup_steps: int = field(check.step, default=0)
    name: str = field(check.name, default=None)

    def decayed(self, rate, step):
        left, done = _shares(*self.left_and_done(step))
        return rate * (half_cosine(left) + self.min_lr * half_cosine(done))
