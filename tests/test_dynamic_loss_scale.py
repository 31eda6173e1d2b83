"""The dynamic loss scale against models of it in plain Python and NumPy.

Every trajectory is compared step for step and exactly: both sides multiply in
float32.
"""

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

from keras_lso.loss_scales import DynamicLossScale
from keras_lso.loss_scales.searching import SearchingLossScale
from testing.loss_scales import built

PATTERNS = st.lists(st.booleans(), min_size=1, max_size=24)


def model_of_dynamic(policy, pattern):
    """The algorithm of the docstring; yields the scale and the counter."""
    scale, good_steps = np.float32(policy.initial_loss_scale), 0
    overflows_left = policy.hysteresis
    for finite in pattern:
        factor = 1.0
        good_steps = good_steps + 1 if finite else 0
        grows = good_steps == policy.increment_period
        if grows:
            factor, good_steps = policy.growth_factor, 0
        if grows or (finite and policy.consecutive_hysteresis):
            overflows_left = policy.hysteresis
        if not finite:
            overflows_left -= 1
            factor = policy.backoff_factor if overflows_left <= 0 else 1.0
        scale = scale * np.float32(factor)
        scale = np.clip(
            scale, np.float32(policy.min_scale), np.float32(policy.max_scale)
        )
        yield float(scale), good_steps


class DeepSpeedLossScaler:
    """`DynamicLossScaler` of DeepSpeed."""

    def __init__(self, policy):
        self.scale = policy.initial_loss_scale
        self.min_scale = policy.min_scale
        self.scale_factor = policy.growth_factor
        self.scale_window = policy.increment_period
        self.delayed_shift = policy.hysteresis
        self.consecutive_hysteresis = policy.consecutive_hysteresis
        self.cur_hysteresis = self.delayed_shift
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def update(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.scale = max(self.scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.scale = self.scale * self.scale_factor
        self.cur_iter += 1


def trajectory(policy, pattern, step=None):
    step = step or policy.step
    for finite in pattern:
        step(ops.convert_to_tensor(finite))
        yield float(policy()), int(ops.convert_to_numpy(policy.step_counter))


@hypothesis.given(
    pattern=PATTERNS,
    initial_loss_scale=st.sampled_from([1.0, 8.0, 1000.0, 2.0**15]),
    increment_period=st.integers(1, 4),
    multiplier=st.sampled_from([2.0, 1.5, 10.0]),
    growth_factor=st.sampled_from([None, 1.001, 4.0]),
    backoff_factor=st.sampled_from([None, 0.7, 0.25]),
    bounds=st.sampled_from([(2.0**-14, 2.0**24), (1.0, 2.0**15), (0.3, 8e37)]),
    hysteresis=st.integers(1, 3),
    consecutive_hysteresis=st.booleans(),
)
# It would grow beyond its upper bound, and fall below its lower bound.
@hypothesis.example(
    pattern=[True, True, False, False, False],
    initial_loss_scale=2.0**15,
    increment_period=1,
    multiplier=2.0,
    growth_factor=4.0,
    backoff_factor=2.0**-9,
    bounds=(1.0, 2.0**15),
    hysteresis=1,
    consecutive_hysteresis=False,
)
def test_dynamic_loss_scale_matches_documented_algorithm(pattern, bounds, **arguments):
    policy = built(
        DynamicLossScale(min_scale=bounds[0], max_scale=bounds[1], **arguments)
    )
    expected = list(model_of_dynamic(policy, pattern))
    assert list(trajectory(policy, pattern)) == expected


CONFIGURATIONS = {
    "default": {"increment_period": 3},
    "factors": {"increment_period": 2, "growth_factor": 1.3, "backoff_factor": 0.4},
    "bounds": {"increment_period": 1, "min_scale": 2.0**13, "max_scale": 40000.0},
    "hysteresis": {"increment_period": 2, "hysteresis": 2},
    "consecutive": {
        "increment_period": 3,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
    },
}


@pytest.mark.each_backend
@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_compiled_dynamic_loss_scale_matches_documented_algorithm(arguments, compiled):
    policy = built(DynamicLossScale(**arguments))
    step = compiled(policy.step, policy.variables)

    @hypothesis.given(PATTERNS)
    def check(pattern):
        policy.reset()
        expected = list(model_of_dynamic(policy, pattern))
        assert list(trajectory(policy, pattern, step)) == expected

    check()


@hypothesis.given(
    pattern=PATTERNS,
    increment_period=st.integers(1, 3),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
)
def test_hysteresis_matches_deepspeed(pattern, **arguments):
    # Far from the upper bound, which it does not have.
    policy = built(DynamicLossScale(2.0**4, max_scale=2.0**100, **arguments))
    deepspeed = DeepSpeedLossScaler(policy)
    for finite in pattern:
        policy.step(ops.convert_to_tensor(finite))
        deepspeed.update(not finite)
        assert float(policy()) == deepspeed.scale


@pytest.fixture
def four_hundred(compiled_once):
    """`four_hundred(finite, **arguments)`: the scales of a policy along such steps."""

    def scales(finite, **arguments):
        policy = built(DynamicLossScale(**arguments))
        step = compiled_once(policy.step, policy.variables)
        return [scale for scale, _ in trajectory(policy, [finite] * 400, step)]

    return scales


@pytest.mark.each_backend
def test_four_hundred_steps_reach_bounds_of_scale(four_hundred):
    for arguments, lowest in [({"min_scale": 0.25}, 0.25), ({}, 2.0**-14)]:
        scales = four_hundred(False, **arguments)
        assert min(scales) == scales[-1] == lowest
    for arguments, highest in [({}, 2.0**24), ({"max_scale": 2.0**126}, 2.0**126)]:
        scales = four_hundred(True, increment_period=1, **arguments)
        assert max(scales) == scales[-1] == highest


def test_increment_period_beyond_int32_causes_no_early_growth():
    policy = built(DynamicLossScale(increment_period=2**40))
    assert list(trajectory(policy, [True, True, False, True])) == [
        (2.0**15, 1),
        (2.0**15, 2),
        (2.0**14, 0),
        (2.0**14, 1),
    ]


def test_float16_floatx_does_not_round_scale_factors():
    before = keras.config.floatx()
    keras.config.set_floatx("float16")
    try:
        policy = built(DynamicLossScale(1024, increment_period=1, growth_factor=1.001))
        pattern = [True, True, False, True]
        expected = list(model_of_dynamic(policy, pattern))
        assert list(trajectory(policy, pattern)) == expected
        policy = built(SearchingLossScale(1000.0, search_factor=10.0))
        policy.step(finite=False)
        assert float(policy()) == np.float32(1000.0) * np.float32(0.1)
    finally:
        keras.config.set_floatx(before)


def test_scale_factors_default_to_multiplier_and_its_inverse():
    policy = DynamicLossScale(multiplier=4.0)
    assert (policy.growth_factor, policy.backoff_factor) == (4.0, 0.25)
    policy = DynamicLossScale(multiplier=4.0, backoff_factor=0.5)
    assert (policy.growth_factor, policy.backoff_factor) == (4.0, 0.5)


def test_dynamic_loss_scale_defaults_match_keras():
    policy = DynamicLossScale()
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert policy.initial_loss_scale == theirs.initial_scale == 2.0**15
    assert policy.increment_period == theirs.dynamic_growth_steps == 2000


@pytest.mark.parametrize(
    "loaded, restored", [((-1, -1), (0, 0)), ((9, 9), (3, 2)), ((2, 1), (2, 1))]
)
def test_restore_brings_loaded_counters_within_range(loaded, restored):
    policy = built(DynamicLossScale(increment_period=4, hysteresis=2))
    policy.step_counter.assign(loaded[0])
    policy.overflows_left.assign(loaded[1])
    policy.restore()
    counters = [policy.step_counter, policy.overflows_left]
    assert tuple(int(c.numpy()) for c in counters) == restored
