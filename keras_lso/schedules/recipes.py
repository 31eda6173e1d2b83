"""Published learning rates for large batches: functions that return schedules."""

from typing import Any, NamedTuple

from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core.checks import (
    check_choice,
    check_positive,
    check_positive_int,
    check_rate,
)
from keras_lso.schedules.combined import JoinedSchedules, LinearWarmup
from keras_lso.schedules.runs import PolynomialDecayWithOffset

_IMAGENET_IMAGES = 1_281_167


def linear_scaling(
    base_learning_rate: float, batch_size: int, base_batch_size: int = 256
) -> float:
    """Scales a learning rate in proportion to the batch size.

    Args:
        base_learning_rate: A known rate.
        batch_size: Positive. The number of examples per step, over all devices.
        base_batch_size: Positive. Its batch size. Defaults to `256`.

    Example:

    >>> import keras_lso
    >>> keras_lso.schedules.linear_scaling(0.1, batch_size=8192)
    3.2

    Reference:

    - [Goyal et al., 2017](https://arxiv.org/abs/1706.02677)
    """
    base_learning_rate = check_rate("base_learning_rate", base_learning_rate)
    batch_size = check_positive_int("batch_size", batch_size)
    base_batch_size = check_positive_int("base_batch_size", base_batch_size)
    return base_learning_rate * batch_size / base_batch_size


class Recipe(NamedTuple):
    """A learning-rate schedule and the matching settings of LARS."""

    learning_rate: LearningRateSchedule
    """The schedule: the optimizer's `learning_rate`."""

    lars: dict[str, Any]
    """The other keyword arguments of `keras_lso.LARS`."""


# Base rate, epochs of the warm-up, steps of the decay, momentum and weight decay.
_MLPERF_RESNET = {
    4096: (10.0, 5, 13137, 0.9, 2e-4),
    8192: (17.0, 5, 6095, 0.9, 2e-4),
    32768: (21.2, 16, 2267, 0.94, 2.5e-5),
}


def mlperf_resnet(batch_size: int, steps_per_epoch: float) -> Recipe:
    """Returns the schedule and LARS settings of MLPerf's ResNet-50 reference.

    The rate rises along a straight line, and decays to 1e-4 with a power of 2, in as
    many epochs as the published rate on ImageNet's 1,281,167 images. LARS has the
    paper's form, without decay and adaptation for biases and normalisation parameters.

    Args:
        batch_size: 4096, 8192 or 32768 examples per step, over all devices. For others,
            see `keras_lso.schedules.linear_scaling`.
        steps_per_epoch: Positive, such as `1281167 / batch_size`.

    Example:

    >>> import keras_lso
    >>> schedule, settings = keras_lso.schedules.mlperf_resnet(8192, 157)
    >>> [f"{float(schedule(step)):.4f}" for step in (0, 1, 785, 786, 3845, 6904)]
    ['0.0000', '0.0217', '17.0000', '16.9944', '4.2487', '0.0001']
    >>> settings["momentum"], settings["weight_decay_rate"]
    (0.9, 0.0002)
    >>> optimizer = keras_lso.LARS(schedule, **settings)

    References:

    - [The reference convergence points of MLPerf training 2.0](
        https://github.com/mlcommons/logging/blob/master/mlperf_logging/rcp_checker/training_2.0.0/rcps_resnet.json)
    - [The reference implementation](
        https://github.com/mlcommons/training/blob/master/image_classification/tensorflow2/lars_util.py)
    """
    batch_size = check_positive_int("batch_size", batch_size)
    check_choice("batch_size", batch_size, _MLPERF_RESNET)
    steps_per_epoch = check_positive("steps_per_epoch", steps_per_epoch)
    rate, warmup_epochs, steps, momentum, weight_decay = _MLPERF_RESNET[batch_size]
    warmup_steps = round(warmup_epochs * steps_per_epoch)
    share_of_imagenet = steps_per_epoch * batch_size / _IMAGENET_IMAGES
    decay = PolynomialDecayWithOffset(
        offset=warmup_steps,
        initial_learning_rate=rate,
        decay_steps=max(1, round(steps * share_of_imagenet)),
        end_learning_rate=1e-4,
        power=2.0,
    )
    settings = {
        "momentum": momentum,
        "weight_decay_rate": weight_decay,
        "eeta": 0.001,
        "trust_ratio": "paper",
        "epsilon": 0.0,
        "exclude_1d": True,
    }
    return Recipe(LinearWarmup(decay, warmup_steps), settings)


class LAMBRecipe(NamedTuple):
    """A learning-rate schedule and the matching settings of LAMB."""

    learning_rate: LearningRateSchedule
    """The schedule: the optimizer's `learning_rate`."""

    lamb: dict[str, Any]
    """The other keyword arguments of `keras_lso.LAMB`."""


# Base rate, steps of the training and of its warm-up, the step (at most 0) at which the
# warm-up starts, beta_1, beta_2 and weight decay.
_MLPERF_BERT: dict[int, tuple[Any, ...]] = {
    256: (3.5e-4, 13700, 0, 0, 0.9, 0.999, 0.01),
    448: (4.25e-4, 6700, 0, 0, 0.9, 0.999, 0.01),
    1536: (2e-3, 2254, 0, 0, 0.66, 0.996, 0.01),
    3072: (2e-3, 1141, 100, 0, 0.66, 0.998, 0.01),
    4096: (2.4e-3, 855, 0, 0, 0.66, 0.998, 0.01),
    4608: (3.5e-3, 700, 0, 0, 0.62, 0.9, 0.01),
    6144: (2.9293e-3, 700, 0, -700, 0.7206, 0.78921, 0.001),
    6912: (2.9293e-3, 700, 0, -700, 0.7206, 0.78921, 0.001),
    8192: (2.88293e-3, 600, 287, -76, 0.88, 0.88, 0.0166629),
    8704: (2.971656225e-3, 600, 287, -76, 0.88, 0.88, 0.0166629),
    12288: (3.1e-3, 500, 300, -100, 0.8, 0.925, 0.0166629),
    13056: (3.19540686e-3, 500, 300, -100, 0.8, 0.925, 0.0166629),
    16384: (3.3e-3, 600, 290, -100, 0.75, 0.9, 0.0166629),
}


def mlperf_bert(batch_size: int) -> LAMBRecipe:
    """Returns the schedule and LAMB settings of MLPerf's BERT reference.

    The rate rises and decays to 0 along straight lines. As in the reference's code, it
    drops when the decay, which counts from step 0, takes over. Biases and layer
    normalization have neither weight decay nor layer adaptation. The benchmark
    continues from a checkpoint: these numbers are not for training from scratch.

    Args:
        batch_size: 256, 448, 1536, 3072, 4096, 4608, 6144, 6912, 8192, 8704, 12288,
            13056 or 16384 sequences per step, over all devices. For others, scale the
            rate by the square root of the batch size, as in arXiv:1904.00962.

    Example:

    >>> import keras_lso
    >>> schedule, settings = keras_lso.schedules.mlperf_bert(8192)
    >>> [f"{1e3 * float(schedule(step)):.4f}" for step in (0, 1, 210, 211, 212, 600)]
    ['0.7634', '0.7735', '2.8729', '1.8691', '1.8643', '0.0000']
    >>> settings["beta_1"], settings["weight_decay_rate"]
    (0.88, 0.0166629)
    >>> optimizer = keras_lso.LAMB(schedule, **settings)

    References:

    - [The reference convergence points of MLPerf training 5.1, `bert_ref_*`](
        https://github.com/mlcommons/logging/blob/master/mlperf_logging/rcp_checker/training_5.1.0/rcps_bert.json)
    - [The reference implementation](
        https://github.com/mlcommons/training/blob/master/retired_benchmarks/bert/optimization.py)
    """
    batch_size = check_positive_int("batch_size", batch_size)
    check_choice("batch_size", batch_size, _MLPERF_BERT)
    *rates, beta_1, beta_2, weight_decay = _MLPERF_BERT[batch_size]
    settings = {
        "beta_1": beta_1,
        "beta_2": beta_2,
        "epsilon": 1e-6,
        "weight_decay_rate": weight_decay,
        "exclude_from_weight_decay": ["(?i)layer_?norm", "bias"],
        "exclude_1d": True,
        "global_clipnorm": 1.0,
    }
    return LAMBRecipe(_bert_schedule(*rates), settings)


def _bert_schedule(
    base: float, steps: int, warmup_steps: int, first_step: int
) -> LearningRateSchedule:
    """Returns the schedule of a row of `_MLPERF_BERT`."""
    if warmup_steps == 0:
        return _line(base, 0.0, steps)
    end = warmup_steps + first_step
    warmup = _line(-first_step / warmup_steps * base, base, end)
    rest = _line(base * (1 - end / steps), 0.0, steps - end)
    return JoinedSchedules([warmup, rest], [end])


def _line(start: float, end: float, steps: int) -> PolynomialDecayWithOffset:
    """Returns a straight line between two rates."""
    return PolynomialDecayWithOffset(
        initial_learning_rate=start, decay_steps=steps, end_learning_rate=end
    )
