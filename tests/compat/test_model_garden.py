"""The Model Garden's schedules: worked examples, its names, its configs.

`tests/schedules/` tests every schedule, and `integration_tests/test_schedules.py`
compares with the Model Garden itself.
"""

import keras
import pytest

from keras_lso.compat.model_garden import (
    ExponentialDecayWithOffset,
    PolynomialWarmUp,
    PowerAndLinearDecay,
    StepCosineDecayWithOffset,
)
from keras_lso.schedules import LinearWarmup, PolynomialWarmup
from testing.schedules import ALL, assert_rates


def test_stepwise_cosine_stays_at_last_value():
    schedule = StepCosineDecayWithOffset([0, 4, 6], [1.0, 0.5, 0.1], offset=3)
    assert_rates(schedule, {3: 1.0, 5: 0.75, 7: 0.5, 8: 0.3, 9: 0.1, 10: 0.1, 99: 0.1})
    assert_rates(StepCosineDecayWithOffset([0], [0.5]), {-1: 0.5, 0: 0.5, 1: 0.5})


def test_power_and_linear_decay_with_extreme_tail_ends_at_zero():
    # A power that is infinite in float32, and a tail that is zero in it.
    steep = PowerAndLinearDecay(1.0, 10, power=200.0)
    short = PowerAndLinearDecay(1.0, 10, power=0.0, linear_decay_fraction=1e-300)
    assert_rates(steep, {10: 0.0, 11: 0.0})
    assert_rates(short, {9: 1.0, 10: 0.0, 11: 0.0})


def test_exponential_decay_may_be_longer_than_any_run():
    schedule = ExponentialDecayWithOffset(
        initial_learning_rate=1.0, decay_steps=2**31, decay_rate=0.25
    )
    assert_rates(schedule, {0: 1.0, 2**30: 0.5})


def test_decays_with_offset_are_instances_of_keras_decays():
    for name in ("PiecewiseConstant", "Polynomial", "Exponential", "Cosine"):
        base = getattr(keras.optimizers.schedules, f"{name}Decay")
        assert isinstance(ALL[f"{name}DecayWithOffset"](), base)


def test_warmups_accept_argument_names_of_model_garden():
    assert PolynomialWarmUp is PolynomialWarmup
    warmup = LinearWarmup(
        after_warmup_lr_sched=0.5, warmup_steps=4, warmup_learning_rate=0.1
    )
    assert warmup.get_config() == LinearWarmup(0.5, 4, 0.1).get_config()
    warmup = PolynomialWarmUp(after_warmup_lr_sched=0.5, warmup_steps=4, power=2.0)
    assert warmup.get_config() == PolynomialWarmup(0.5, 4, 2.0).get_config()


@pytest.mark.parametrize(
    "arguments",
    [
        {"schedule_or_rate": 0.5, "after_warmup_lr_sched": 0.5},
        {
            "schedule_or_rate": 0.5,
            "initial_learning_rate": 0.1,
            "warmup_learning_rate": 0.1,
        },
    ],
)
def test_argument_under_both_names_is_rejected(arguments):
    with pytest.raises(TypeError, match="got multiple values for"):
        LinearWarmup(warmup_steps=4, **arguments)


def test_old_config_with_constant_rate_loads():
    old = {"after_warmup_lr_sched": 0.5, "warmup_steps": 4, "warmup_learning_rate": 0.1}
    old["name"] = None
    expected = LinearWarmup(0.5, 4, 0.1).get_config()
    assert LinearWarmup.from_config(old).get_config() == expected
    assert old["after_warmup_lr_sched"] == 0.5


@pytest.mark.parametrize("cls", [LinearWarmup, PolynomialWarmup])
def test_old_config_without_class_of_its_schedule_is_rejected(cls):
    decay = keras.optimizers.schedules.PolynomialDecay(1.0, 10)
    old = {"after_warmup_lr_sched": decay.get_config(), "warmup_steps": 4}
    with pytest.raises(ValueError, match=r"schedules\.serialize\(schedule\)"):
        cls.from_config(old)
    old["after_warmup_lr_sched"] = {
        "class_name": "PolynomialDecay",
        "config": decay.get_config(),
    }
    assert_rates(cls.from_config(old), {4: float(decay(4)), 5: float(decay(5))})
