"""OpenSeq2Seq's learning-rate policies of no decay: constants and the Transformer's.

They are apart from `policies_decay.py`, whose schedules share a warm-up and a delay.
"""

import math

from keras import ops

from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import float32
from keras_lso.schedules._declared import Schedule, declared, field
from keras_lso.schedules._steps import elapsed, in_float32, whole
from keras_lso.schedules.keras_decays import PiecewiseConstantDecayWithOffset


@declared("FixedLR")
class FixedLR(Schedule):
    """OpenSeq2Seq's `fixed_lr`: the same rate at every step.

    ```python
    rate = learning_rate
    ```

    Args:
        learning_rate: Float. The rate.
        {{others}}

    Example:

    >>> from keras_lso.schedules import FixedLR
    >>> schedule = FixedLR(0.25)
    >>> [float(schedule(step)) for step in (0, 1, 1_000_000)]
    [0.25, 0.25, 0.25]

    {{open_seq2seq}}
    """

    learning_rate: float = field(check.rate)
    name: str = field(check.name, default="FixedLR")

    def __call__(self, step):
        return float32(self.learning_rate)


def _boundaries_in_steps(boundaries, steps_per_epoch, count):
    """Returns `boundaries`, which are epochs, as a list of `count` steps."""
    # Without the inner rounding 0.29 * 100 would be 28 steps, not 29.
    steps = [
        math.floor(round(check.rate(f"boundaries[{i}]", epoch) * steps_per_epoch, 6))
        for i, epoch in enumerate(check.any_list("boundaries", boundaries))
    ]
    try:
        return check.boundaries(steps, count, "as many as `decay_rates`")
    except ValueError as error:
        raise ValueError(
            f"{error}, in steps of boundaries={boundaries} epochs, with "
            f"steps_per_epoch={steps_per_epoch}"
        ) from None


@declared("PiecewiseConstant")
class PiecewiseConstant(Schedule):
    """OpenSeq2Seq's `piecewise_constant`: multiples of a rate, one after the other.

    ```python
    if steps_per_epoch is not None:
        boundaries = [floor(epoch * steps_per_epoch) for epoch in boundaries]
    if step <= boundaries[0]: rate = learning_rate
    elif step <= boundaries[1]: rate = learning_rate * decay_rates[0]
    ...
    else: rate = learning_rate * decay_rates[-1]
    ```

    Note that a boundary itself still belongs to the interval before it, and that
    every factor multiplies the initial rate.

    Args:
        learning_rate: Float. The initial rate.
        boundaries: List of ints, strictly increasing. The last step of each interval
            but the last one. With `steps_per_epoch` a list of ints and floats, the
            epochs after which the rate changes; a fraction of a step is dropped.
        decay_rates: List of floats, as many as `boundaries`. The factors of the
            initial rate after each of them.
        steps_per_epoch: Positive int. The number of batches in an epoch. Defaults to
            `None`: the boundaries are steps.
        {{others}}

    Example:

    >>> from keras_lso.schedules import PiecewiseConstant
    >>> schedule = PiecewiseConstant(0.8, [1, 2.5], [0.5, 0.125], steps_per_epoch=2)
    >>> [f"{float(schedule(step)):.1f}" for step in range(8)]
    ['0.8', '0.8', '0.8', '0.4', '0.4', '0.4', '0.1', '0.1']

    {{open_seq2seq}}
    """

    learning_rate: float = field(check.rate)
    boundaries: list = field(check.any_list)
    decay_rates: list = field(check.list_of(check.rate, at_least=1))
    steps_per_epoch: int | None = field(
        check.optional(check.positive_int), default=None
    )
    name: str = field(check.name, default="PiecewiseConstant")

    def _validate(self):
        count = len(self.decay_rates)
        if self.steps_per_epoch is None:
            steps = check.boundaries(self.boundaries, count, "as many as `decay_rates`")
            self.boundaries = steps
        else:
            steps = _boundaries_in_steps(self.boundaries, self.steps_per_epoch, count)
            self.boundaries = [float(epoch) for epoch in self.boundaries]
        values = [
            check.rate(f"learning_rate * decay_rates[{i}]", self.learning_rate * rate)
            for i, rate in enumerate(self.decay_rates)
        ]
        self._in_steps = PiecewiseConstantDecayWithOffset(
            boundaries=steps, values=[self.learning_rate, *values]
        )

    def __call__(self, step):
        return self._in_steps(whole(step))


@declared("TransformerPolicy", returns="a scalar of `dtype`")
class TransformerPolicy(Schedule):
    """OpenSeq2Seq's `transformer_policy`: a line up, then one over the square root.

    ```python
    step = step + 1
    rate = coefficient * d_model**-0.5 * min(step * warmup_steps**-1.5, step**-0.5)
    rate = min(learning_rate * rate, max_lr)
    ```

    The rate is highest at step `warmup_steps - 1`. This schedule of the Transformer,
    also called "Noam", has a cap in OpenSeq2Seq.

    Args:
        learning_rate: Float. A factor of the rate.
        d_model: Positive int. The width of the model.
        warmup_steps: Positive int. The number of steps of the line.
        max_lr: Float. The cap. Defaults to `None`: none.
        coefficient: Float. Another factor; OpenSeq2Seq recommends 0.002 for Adam.
        dtype: String, or a dtype of NumPy or a framework. The dtype of the rate, which
            is computed in float32.
        {{others}}

    Example:

    >>> from keras_lso.schedules import TransformerPolicy
    >>> schedule = TransformerPolicy(2.0, d_model=16, warmup_steps=4, max_lr=0.23)
    >>> [f"{float(schedule(step)):.4f}" for step in (0, 1, 2, 3, 4, 8, 15)]
    ['0.0625', '0.1250', '0.1875', '0.2300', '0.2236', '0.1667', '0.1250']

    {{open_seq2seq}}
    - [Vaswani et al., 2017, Attention Is All You Need](
        https://arxiv.org/abs/1706.03762)
    """

    learning_rate: float = field(check.rate)
    d_model: int = field(check.positive_int)
    warmup_steps: int = field(check.positive_int)
    max_lr: float | None = field(check.optional(check.rate), default=None)
    coefficient: float = field(check.rate, default=1.0)
    dtype: str = field(check.float_dtype, default="float32")
    name: str = field(check.name, default="TransformerPolicy")

    def __call__(self, step):
        count = in_float32(elapsed(whole(step), -1))
        scale = self.learning_rate * self.coefficient * self.d_model**-0.5
        rate = ops.minimum(
            count * (scale * self.warmup_steps**-1.5), scale / ops.sqrt(count)
        )
        if self.max_lr is not None:
            rate = ops.minimum(rate, float32(self.max_lr))
        return ops.cast(rate, self.dtype)
