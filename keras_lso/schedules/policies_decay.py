"""OpenSeq2Seq's learning-rate policies that decay, after a warm-up and a wait."""

import math

import keras
from keras import ops

from keras_lso._checks import check_bool, check_factor
from keras_lso.schedules._members import elapsed, float32
from keras_lso.schedules._powers import power_of_share, power_of_two
from keras_lso.schedules._waiting import WaitingDecay, WarmedUpDecay


@keras.saving.register_keras_serializable("keras_lso", name="ExpDecay")
class ExpDecay(WaitingDecay):
    """OpenSeq2Seq's `exp_decay`: waits, then decays exponentially to a minimum.

    ```python
    step = max(step - begin_decay_at, 0)
    exponent = step / decay_steps
    if use_staircase_decay:
        exponent = floor(exponent)
    rate = max(learning_rate * decay_rate ** exponent, min_lr)
    ```

    `min_lr` is the least rate of all steps, the first ones included, and may be above
    `learning_rate`. Accurate to 1e-6 of the rate up to step 2**24.

    Args:
        learning_rate: Float. The initial rate.
        decay_steps: Positive int. The number of steps (not epochs) in which the rate
            is multiplied by `decay_rate` once.
        decay_rate: Positive float.
        use_staircase_decay: Bool. Whether the rate falls in stairs.
        begin_decay_at: Int of zero or more. The first step of the decay. Defaults to
            `0`.
        min_lr: Float. The minimum. Defaults to `0.0`.
        name: String. Defaults to `"ExpDecay"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, `decay_steps` or
            `decay_rate` is not positive, or `begin_decay_at` is negative.

    Example:

    >>> import keras_lso
    >>> smooth, stairs = [
    ...     keras_lso.schedules.ExpDecay(
    ...         0.8, 2, 0.25, use_staircase_decay=stairs, begin_decay_at=2, min_lr=0.02
    ...     )
    ...     for stairs in (False, True)
    ... ]
    >>> for step in range(9):
    ...     print(step, f"{float(smooth(step)):.3f}", f"{float(stairs(step)):.3f}")
    0 0.800 0.800
    1 0.800 0.800
    2 0.800 0.800
    3 0.400 0.800
    4 0.200 0.200
    5 0.100 0.200
    6 0.050 0.050
    7 0.025 0.050
    8 0.020 0.020

    Reference:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """

    def __init__(
        self,
        learning_rate,
        decay_steps,
        decay_rate,
        use_staircase_decay,
        begin_decay_at=0,
        min_lr=0.0,
        name="ExpDecay",
    ):
        super().__init__(learning_rate, decay_steps, begin_decay_at, min_lr, name)
        self.decay_rate = check_factor("decay_rate", decay_rate, above=0.0)
        self.use_staircase_decay = check_bool(
            "use_staircase_decay", use_staircase_decay
        )

    def __call__(self, step):
        return ops.maximum(super().__call__(step), float32(self.min_lr))

    def decayed(self, rate, step):
        halvings = math.log2(self.decay_rate)
        if self.use_staircase_decay:
            decay = power_of_two(step // self.decay_steps, halvings)
        else:
            decay = power_of_two(step, halvings / self.decay_steps)
        return rate * decay

    def get_config(self):
        return {
            **super().get_config(),
            "decay_rate": self.decay_rate,
            "use_staircase_decay": self.use_staircase_decay,
        }


@keras.saving.register_keras_serializable("keras_lso", name="PolyDecay")
class PolyDecay(WarmedUpDecay):
    """OpenSeq2Seq's `poly_decay`: warms up, waits, then follows a power to a minimum.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    if step >= begin_decay_at:
        step = min(step - begin_decay_at, decay_steps)
        left = (1 - step / decay_steps) ** power
        rate = rate * left + min_lr * (1 - left)
    ```

    The decay counts from `begin_decay_at` also where the warm-up takes longer: then
    the rate that is still warming up is what decays. To have one after the other,
    write `begin_decay_at=warmup_steps`.

    With a `min_lr` above `learning_rate` the rate rises to it. Accurate to 1e-6 of
    the rate for `decay_steps` of up to 2**24 and powers of up to 300.

    Args:
        learning_rate: Float. The rate before the decay.
        decay_steps: Positive int. The number of steps (not epochs) of the decay.
        power: Positive float. Defaults to `1.0`: a straight line.
        begin_decay_at: Int of zero or more. The first step of the decay. Defaults to
            `0`.
        min_lr: Float. The rate after the decay. Defaults to `0.0`.
        warmup_steps: Int of zero or more. The number of steps of the warm-up. Defaults
            to `0`: none.
        name: String. Defaults to `"PolyDecay"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, `decay_steps` or `power`
            is not positive, or `begin_decay_at` or `warmup_steps` is negative.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.PolyDecay(
    ...     0.8, 4, power=2.0, begin_decay_at=3, min_lr=0.1, warmup_steps=2
    ... )
    >>> for step in range(9):
    ...     print(step, f"{float(schedule(step)):.3f}")
    0 0.000
    1 0.400
    2 0.800
    3 0.800
    4 0.494
    5 0.275
    6 0.144
    7 0.100
    8 0.100

    Reference:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """

    def decayed(self, rate, step):
        left, done = self.left_and_done(step)
        share_left = power_of_share(left, 0.0, self.decay_steps, self.power)
        # 1 - share_left, which would cancel out at the begin of a rate that rises.
        line = elapsed(done) / self.decay_steps
        log_left = ops.where(
            line < 0.5,
            ops.log1p(-ops.minimum(line, float32(0.5))),
            ops.log(elapsed(left) / self.decay_steps),
        )
        share_done = -ops.expm1(self.power * log_left)
        return rate * share_left + self.min_lr * share_done


@keras.saving.register_keras_serializable("keras_lso", name="InvPolyDecay")
class InvPolyDecay(WarmedUpDecay):
    """OpenSeq2Seq's `inv_poly_decay`: one over a power of the steps, to a minimum.

    ```python
    min_lr = clip(min_lr, 1e-8, learning_rate)
    k = ((learning_rate / min_lr) ** (1 / power) - 1) / decay_steps
    begin = max(warmup_steps, begin_decay_at)
    rate = learning_rate * min(1, step / warmup_steps)
    if step >= begin:
        rate = max(rate / (1 + k * (step - begin)) ** power, min_lr)
    ```

    The rate is `min_lr` at `decay_steps` steps after `begin`, and from there on. This
    is what OpenSeq2Seq's page says; its code goes on below `min_lr`, and ignores
    `begin_decay_at` and `warmup_steps`. Accurate to 1e-6 of the rate for powers of up
    to 300.

    Args:
        learning_rate: Float. The rate before the decay.
        decay_steps: Positive int. The number of steps (not epochs) of the decay.
        min_lr: Float. The rate after it. Below 1e-8 it counts as 1e-8, above
            `learning_rate` as `learning_rate`.
        power: Positive float. Defaults to `1.0`. The larger, the more the decay is
            like an exponential one.
        begin_decay_at: Int of zero or more. The first step of the decay, if it is not
            before the end of the warm-up. Defaults to `0`.
        warmup_steps: Int of zero or more. The number of steps of the warm-up. Defaults
            to `0`: none.
        name: String. Defaults to `"InvPolyDecay"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, `decay_steps` or `power`
            is not positive, or `begin_decay_at` or `warmup_steps` is negative.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.InvPolyDecay(
    ...     0.8, 4, min_lr=0.2, begin_decay_at=3, warmup_steps=2
    ... )
    >>> for step in range(9):
    ...     print(step, f"{float(schedule(step)):.3f}")
    0 0.000
    1 0.400
    2 0.800
    3 0.800
    4 0.457
    5 0.320
    6 0.246
    7 0.200
    8 0.200

    Reference:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """

    def __init__(
        self,
        learning_rate,
        decay_steps,
        min_lr,
        power=1.0,
        begin_decay_at=0,
        warmup_steps=0,
        name="InvPolyDecay",
    ):
        super().__init__(
            learning_rate,
            decay_steps,
            power,
            begin_decay_at,
            min_lr,
            warmup_steps,
            name,
        )

    @property
    def _begin(self):
        return max(self.warmup_steps, self.begin_decay_at)

    def decayed(self, rate, step):
        # The warm-up is over: the rate is the learning rate.
        lowest = min(max(self.min_lr, 1e-8), self.learning_rate)
        if lowest == self.learning_rate:
            return float32(lowest)
        # With offset = 1 / k, and seen from the end of the decay, where neither a
        # large nor a small k leaves float32's range:
        #   rate = lowest * ((step + offset) / (decay_steps + offset)) ** -power
        shrink = math.log(lowest / self.learning_rate) / self.power
        offset = self.decay_steps * math.exp(shrink) / -math.expm1(shrink)
        _, done = self.left_and_done(step)
        share = power_of_share(done, offset, self.decay_steps + offset, -self.power)
        return ops.clip(lowest * share, float32(lowest), float32(self.learning_rate))


@keras.saving.register_keras_serializable("keras_lso", name="CosineDecay")
class CosineDecay(WarmedUpDecay):
    """OpenSeq2Seq's `cosine_decay`: warms up, waits, then follows half a cosine.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    if step >= begin_decay_at:
        step = min(step - begin_decay_at, decay_steps)
        cosine = (1 + cos(pi * step / decay_steps)) / 2
        rate = rate * ((1 - min_lr) * cosine + min_lr)
    ```

    The decay counts from `begin_decay_at` also where the warm-up takes longer: then
    the rate that is still warming up is what decays. To have one after the other,
    write `begin_decay_at=warmup_steps`.

    Note that `min_lr` is a fraction of the rate; above 1 the rate rises. Accurate to
    1e-6 of the rate for `decay_steps` of up to 2**24.

    Args:
        learning_rate: Float. The rate before the decay.
        decay_steps: Positive int. The number of steps (not epochs) of the decay.
        power: Positive float. Has no effect, as in OpenSeq2Seq. Defaults to `1.0`.
        begin_decay_at: Int of zero or more. The first step of the decay. Defaults to
            `0`.
        min_lr: Float. The rate after the decay as a fraction of `learning_rate`.
            Defaults to `0.0`.
        warmup_steps: Int of zero or more. The number of steps of the warm-up. Defaults
            to `0`: none.
        name: String. Defaults to `"CosineDecay"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, `decay_steps` or `power`
            is not positive, or `begin_decay_at` or `warmup_steps` is negative.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.CosineDecay(
    ...     0.8, 4, begin_decay_at=3, min_lr=0.1, warmup_steps=2
    ... )
    >>> for step in range(9):
    ...     print(step, f"{float(schedule(step)):.3f}")
    0 0.000
    1 0.400
    2 0.800
    3 0.800
    4 0.695
    5 0.440
    6 0.185
    7 0.080
    8 0.080

    References:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    - [Loshchilov and Hutter, 2017, SGDR](https://arxiv.org/abs/1608.03983)
    """

    def decayed(self, rate, step):
        # (1 + cos(pi * x)) / 2 is sin(pi / 2 * (1 - x)) ** 2, which does not cancel
        # out near the end. One minus that is sin(pi / 2 * x) ** 2.
        left, done = (
            ops.square(ops.sin(elapsed(steps) * (math.pi / 2 / self.decay_steps)))
            for steps in self.left_and_done(step)
        )
        return rate * (left + self.min_lr * done)
