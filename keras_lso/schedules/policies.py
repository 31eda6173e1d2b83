"""OpenSeq2Seq's learning-rate policies that do not decay: constants and Transformer's.

Those that do are in `policies_decay.py`.
"""

import math

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._checks import (
    check_boundaries,
    check_list,
    check_positive_int,
    check_rate,
)
from keras_lso.schedules._members import check_name, elapsed, float32
from keras_lso.schedules._powers import whole
from keras_lso.schedules.keras_decays import PiecewiseConstantDecayWithOffset


@keras.saving.register_keras_serializable("keras_lso", name="FixedLR")
class FixedLR(LearningRateSchedule):
    """OpenSeq2Seq's `fixed_lr`: the same rate at every step.

    ```python
    rate = learning_rate
    ```

    Args:
        learning_rate: Float. The rate.
        name: String. Defaults to `"FixedLR"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If the rate is not a number.
        ValueError: If the rate is negative, NaN or infinite.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.FixedLR(0.25)
    >>> [float(schedule(step)) for step in (0, 1, 1_000_000)]
    [0.25, 0.25, 0.25]

    Reference:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """

    def __init__(self, learning_rate, name="FixedLR"):
        self.learning_rate = check_rate("learning_rate", learning_rate)
        self.name = check_name(name, self)

    def __call__(self, step):
        return float32(self.learning_rate)

    def get_config(self):
        return {"learning_rate": self.learning_rate, "name": self.name}


def _boundaries_in_steps(boundaries, steps_per_epoch, count):
    """Returns `boundaries`, which are epochs, as a list of `count` steps."""
    # No step lies between a fraction of one and the whole one below it. The inner
    # rounding makes 29 steps, and not 28, of 0.29 * 100.
    steps = [
        math.floor(round(check_rate(f"boundaries[{i}]", epoch) * steps_per_epoch, 6))
        for i, epoch in enumerate(check_list("boundaries", boundaries))
    ]
    try:
        return check_boundaries(steps, count, "as many as `decay_rates`")
    except ValueError as error:
        raise ValueError(
            f"{error}, in steps of boundaries={boundaries} epochs, with "
            f"steps_per_epoch={steps_per_epoch}"
        ) from None


@keras.saving.register_keras_serializable("keras_lso", name="PiecewiseConstant")
class PiecewiseConstant(LearningRateSchedule):
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
        decay_rates: List of floats, as many as `boundaries`. What the initial rate is
            multiplied with after each of them.
        steps_per_epoch: Positive int. The number of batches in an epoch. Defaults to
            `None`: the boundaries are steps.
        name: String. Defaults to `"PiecewiseConstant"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, `steps_per_epoch` is not
            a positive integer, or the boundaries are none, do not increase or do not
            fit the rates.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.PiecewiseConstant(
    ...     0.8, boundaries=[1, 2.5], decay_rates=[0.5, 0.125], steps_per_epoch=2
    ... )
    >>> for step in range(8):
    ...     print(step, f"{float(schedule(step)):.1f}")
    0 0.8
    1 0.8
    2 0.8
    3 0.4
    4 0.4
    5 0.4
    6 0.1
    7 0.1

    Reference:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """

    def __init__(
        self,
        learning_rate,
        boundaries,
        decay_rates,
        steps_per_epoch=None,
        name="PiecewiseConstant",
    ):
        self.learning_rate = check_rate("learning_rate", learning_rate)
        decay_rates = check_list("decay_rates", decay_rates, at_least=1)
        self.decay_rates = [
            check_rate(f"decay_rates[{i}]", rate) for i, rate in enumerate(decay_rates)
        ]
        count = len(decay_rates)
        if steps_per_epoch is None:
            steps = check_boundaries(boundaries, count, "as many as `decay_rates`")
            self.boundaries = steps
        else:
            steps_per_epoch = check_positive_int("steps_per_epoch", steps_per_epoch)
            steps = _boundaries_in_steps(boundaries, steps_per_epoch, count)
            self.boundaries = [float(epoch) for epoch in boundaries]
        self.steps_per_epoch = steps_per_epoch
        self.name = check_name(name, self)
        values = [
            check_rate(f"learning_rate * decay_rates[{i}]", self.learning_rate * rate)
            for i, rate in enumerate(self.decay_rates)
        ]
        self._in_steps = PiecewiseConstantDecayWithOffset(
            boundaries=steps, values=[self.learning_rate, *values]
        )

    def __call__(self, step):
        return self._in_steps(whole(step))

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "boundaries": self.boundaries,
            "decay_rates": self.decay_rates,
            "steps_per_epoch": self.steps_per_epoch,
            "name": self.name,
        }


def _check_float_dtype(argument, value):
    """Returns the name of a dtype of floats, NumPy's and the frameworks' included."""
    try:
        name = None if value is None else keras.backend.standardize_dtype(value)
    except (TypeError, ValueError):
        name = None
    if name is None or not keras.backend.is_float_dtype(name):
        raise ValueError(
            f"Argument `{argument}` must be a dtype of floats such as 'float32'. "
            f"Received: {argument}={value!r}"
        )
    return name


@keras.saving.register_keras_serializable("keras_lso", name="TransformerPolicy")
class TransformerPolicy(LearningRateSchedule):
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
            Defaults to `1.0`.
        dtype: String, or a dtype of NumPy or a framework. What the rate, which is
            computed in float32, is returned in. Defaults to `"float32"`.
        name: String. Defaults to `"TransformerPolicy"`.

    Returns:
        A schedule: called with a step, it returns the rate, a scalar of `dtype`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, NaN or infinite, `d_model` or
            `warmup_steps` is not a positive integer, or `dtype` is not one of floats.

    Example:

    >>> import keras_lso
    >>> free, capped = [
    ...     keras_lso.schedules.TransformerPolicy(
    ...         2.0, d_model=16, warmup_steps=4, max_lr=max_lr
    ...     )
    ...     for max_lr in (None, 0.2)
    ... ]
    >>> for step in (0, 1, 2, 3, 4, 8, 15):
    ...     print(step, f"{float(free(step)):.4f}", f"{float(capped(step)):.4f}")
    0 0.0625 0.0625
    1 0.1250 0.1250
    2 0.1875 0.1875
    3 0.2500 0.2000
    4 0.2236 0.2000
    8 0.1667 0.1667
    15 0.1250 0.1250

    References:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    - [Vaswani et al., 2017, Attention Is All You Need](
        https://arxiv.org/abs/1706.03762)
    """

    def __init__(
        self,
        learning_rate,
        d_model,
        warmup_steps,
        max_lr=None,
        coefficient=1.0,
        dtype="float32",
        name="TransformerPolicy",
    ):
        self.learning_rate = check_rate("learning_rate", learning_rate)
        self.d_model = check_positive_int("d_model", d_model)
        self.warmup_steps = check_positive_int("warmup_steps", warmup_steps)
        self.max_lr = None if max_lr is None else check_rate("max_lr", max_lr)
        self.coefficient = check_rate("coefficient", coefficient)
        self.dtype = _check_float_dtype("dtype", dtype)
        self.name = check_name(name, self)

    def __call__(self, step):
        count = elapsed(whole(step), -1)
        scale = self.learning_rate * self.coefficient * self.d_model**-0.5
        rate = ops.minimum(
            count * (scale * self.warmup_steps**-1.5), scale / ops.sqrt(count)
        )
        if self.max_lr is not None:
            rate = ops.minimum(rate, float32(self.max_lr))
        return ops.cast(rate, self.dtype)

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "d_model": self.d_model,
            "warmup_steps": self.warmup_steps,
            "max_lr": self.max_lr,
            "coefficient": self.coefficient,
            "dtype": self.dtype,
            "name": self.name,
        }
