"""The recipes: the rates and the settings of the published runs."""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso.schedules import linear_scaling, mlperf_bert, mlperf_resnet
from testing.schedules import EPSILON, assert_rates, rates, through_json


def test_linear_scaling_is_proportional_to_batch_size():
    assert linear_scaling(0.1, 256) == 0.1
    assert linear_scaling(0.1, 8192) == 3.2
    assert linear_scaling(0.5, 64, base_batch_size=128) == 0.25
    assert type(linear_scaling(np.float32(1), np.int64(512))) is float


def mlperf_rate(step, base, warmup_steps, decay_steps):
    """The rate of MLPerf's reference implementation, in float64."""
    if step <= warmup_steps:
        return base * step / warmup_steps
    left = 1 - min(step - warmup_steps, decay_steps) / decay_steps
    return (base - 1e-4) * left**2 + 1e-4


@pytest.mark.parametrize(
    "batch_size, steps_per_epoch, base, warmup_steps, decay_steps",
    [
        # At ImageNet's own number of steps the decay is the published one.
        (4096, 1281167 / 4096, 10.0, 1564, 13137),
        (8192, 1281167 / 8192, 17.0, 782, 6095),
        (32768, 1281167 / 32768, 21.2, 626, 2267),
        # Data of a tenth of the size: a tenth of the steps, as many epochs.
        (4096, 128116.7 / 4096, 10.0, 156, 1314),
        # 6095 * 157 / 156.39
        (8192, 157, 17.0, 785, 6119),
        (32768, 40, 21.2, 640, 2319),
    ],
)
def test_mlperf_resnet_rates_match_reference(
    batch_size, steps_per_epoch, base, warmup_steps, decay_steps
):
    schedule = mlperf_resnet(batch_size, steps_per_epoch).learning_rate
    end = warmup_steps + decay_steps
    steps = [0, 1, 2, warmup_steps - 1, warmup_steps, warmup_steps + 1]
    steps += [end - 1, end, end + 1, *range(0, end + 500, 211)]
    expected = [mlperf_rate(s, base, warmup_steps, decay_steps) for s in steps]
    # Near its end the rate is a small difference of two numbers as large as `base`.
    np.testing.assert_allclose(
        rates(schedule, steps), expected, rtol=8 * EPSILON, atol=EPSILON * 1e-2 * base
    )
    assert rates(schedule, [0]) == 0.0
    assert schedule.warmup_steps == warmup_steps
    assert schedule.schedule_or_rate.decay_steps == decay_steps
    restored = through_json(schedule)
    np.testing.assert_array_equal(rates(restored, steps), rates(schedule, steps))


@pytest.mark.parametrize(
    "batch_size, momentum, weight_decay_rate",
    [(4096, 0.9, 2e-4), (8192, 0.9, 2e-4), (32768, 0.94, 2.5e-5)],
)
def test_mlperf_resnet_settings_match_published_values(
    batch_size, momentum, weight_decay_rate
):
    schedule, settings = mlperf_resnet(batch_size, 100)
    assert isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    assert settings == {
        "momentum": momentum,
        "weight_decay_rate": weight_decay_rate,
        "eeta": 0.001,
        "trust_ratio": "paper",
        "epsilon": 0.0,
        "exclude_1d": True,
    }


# Points of rcps_bert.json of MLPerf training 5.1: base rate, steps, warm-up, its start.
MLPERF_BERT = {
    256: (0.00035, 13700, 0, 0),
    3072: (0.002, 1141, 100, 0),
    6912: (0.0029293, 700, 0, -700),
    8192: (0.00288293, 600, 287, -76),
}


def mlperf_bert_rate(step, base, steps, warmup, start):
    """The rate of `create_optimizer` in MLPerf's reference, in float64."""
    rate = base * (1 - min(step, steps) / steps)
    if warmup and step - start < warmup:
        rate = base * (step - start) / warmup
    return rate


@pytest.mark.parametrize("batch_size", MLPERF_BERT)
def test_mlperf_bert_rates_match_reference(batch_size):
    point = MLPERF_BERT[batch_size]
    schedule = mlperf_bert(batch_size).learning_rate
    end = max(0, sum(point[2:]))
    steps = [0, 1, 2, end - 1, end, end + 1, *range(0, point[1] + 100, 61)]
    steps = [step for step in steps if step >= 0]
    expected = [mlperf_bert_rate(step, *point) for step in steps]
    np.testing.assert_allclose(
        rates(schedule, steps), expected, rtol=8 * EPSILON, atol=4 * EPSILON * point[0]
    )
    restored = through_json(schedule)
    np.testing.assert_array_equal(rates(restored, steps), rates(schedule, steps))


def test_mlperf_bert_settings_match_published_values():
    schedule, settings = mlperf_bert(6912)
    assert settings == {
        "beta_1": 0.7206,
        "beta_2": 0.78921,
        "epsilon": 1e-6,
        "weight_decay_rate": 0.001,
        "exclude_from_weight_decay": ["(?i)layer_?norm", "bias"],
        "exclude_1d": True,
        "global_clipnorm": 1.0,
    }
    config = keras_lso.LAMB(schedule, **settings).get_config()
    assert {key: config[key] for key in settings} == settings


def test_mlperf_resnet_rates_are_finite_for_tiny_number_of_steps():
    schedule = mlperf_resnet(4096, 1e-6).learning_rate
    assert_rates(schedule, {0: 10.0, 1: 1e-4})
