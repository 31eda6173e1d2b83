"""`SearchingLossScale` against its docstring, in Python."""

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales.searching import SearchingLossScale


class Reference:
    """The pseudo-code of the docstring."""

    def __init__(self, policy):
        self.policy, self.scale = policy, policy.initial_loss_scale
        self.good_steps = self.climbs_left = 0
        self.has_found = self.has_fallen = False
        self.climbs = 0
        # By multiplication, where the policy takes logarithms.
        while policy.multiplier ** (self.climbs + 1) < policy.search_factor * (
            1 - 1e-9
        ):
            self.climbs += 1

    def step(self, finite):
        self._move(finite)
        self.scale = min(max(self.scale, self.policy.min_scale), self.policy.max_scale)

    def _move(self, finite):
        policy = self.policy
        if not self.has_found and not finite:
            self.scale, self.has_fallen = self.scale / policy.search_factor, True
            return
        is_climbing = self.climbs_left > 0
        if not self.has_found:
            self.has_found = True
            self.climbs_left = self.climbs if self.has_fallen else 0
        if not finite:
            self.scale /= policy.multiplier
            self.good_steps = self.climbs_left = 0
            return
        self.good_steps += 1
        period = policy.increment_period
        if is_climbing:
            period = min(period, policy.search_period)
        if self.good_steps >= period:
            self.scale *= policy.multiplier
            self.good_steps = 0
            if is_climbing:
                self.climbs_left -= 1


def course(policy, pattern):
    policy.build()
    for finite in pattern:
        policy.step(ops.convert_to_tensor(finite))
        yield float(policy()), int(ops.convert_to_numpy(policy.step_counter))


@hypothesis.given(
    pattern=st.lists(st.booleans(), min_size=1, max_size=30),
    initial=st.sampled_from([1.0, 8.0, 2.0**15]),
    increment_period=st.integers(1, 5),
    multiplier_and_factor=st.sampled_from(
        [(2.0, 16.0), (2.0, 10.0), (4.0, 4.0), (5.0, 125.0)]
    ),
    search_period=st.integers(1, 7),
)
# A whole climb. The quotient of these logarithms is above 3.
@hypothesis.example([False] + [True] * 9, 2.0**15, 5, (5.0, 125.0), 1)
def test_searching_loss_scale_matches_documented_algorithm(
    pattern, initial, increment_period, multiplier_and_factor, search_period
):
    multiplier, search_factor = multiplier_and_factor
    policy = SearchingLossScale(
        initial, increment_period, multiplier, search_factor, search_period
    )
    reference = Reference(policy)
    for finite, (scale, good_steps) in zip(
        pattern, course(policy, pattern), strict=True
    ):
        reference.step(finite)
        # A factor of 10 rounds in float32.
        assert scale == pytest.approx(reference.scale, rel=1e-6)
        assert good_steps == reference.good_steps


def train(compile_, policy, limit, steps):
    """Returns how many steps were skipped, where scales above a limit overflow."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), **policy)
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    apply = compile_(
        lambda grad: optimizer.apply([grad], [weight]), [weight, *optimizer.variables]
    )
    for _ in range(steps):
        finite = float(optimizer.loss_scale) <= limit
        apply(ops.convert_to_tensor(np.float32(1.0 if finite else np.inf)))
    return int(optimizer.skipped_steps), float(optimizer.loss_scale)


# After one fall or two, and a climb or none; the course of each is shown above.
@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(2.0**7, marks=pytest.mark.full),
        2.0**9,
        pytest.param(2.0**12, marks=pytest.mark.full),
    ],
)
def test_search_reaches_dynamic_scale_with_at_most_three_skipped_steps(
    limit, compiled_once
):
    # After 15 steps at most it stays where it is.
    halving, height = train(compiled_once, {}, limit, steps=20)
    auto = {"initial_scale": "auto"}
    searching, found = train(compiled_once, auto, limit, steps=100)
    assert halving == 15 - np.log2(limit)
    # Two to fall, and at most one to see that it does not fit.
    assert searching <= 3
    assert found == height == limit


@pytest.mark.parametrize("bounds", [{"max_scale": 2.0**10}, {"min_scale": 2.0**20}])
def test_auto_initial_scale_starts_within_bounds(bounds):
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale="auto", dynamic_growth_steps=7, **bounds
    )
    policy = optimizer.loss_scale_policy
    assert type(policy) is SearchingLossScale
    assert policy.increment_period == 7
    assert [policy.initial_loss_scale] == list(bounds.values())
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()


def test_fixed_scale_cannot_be_searched():
    with pytest.raises(TypeError, match="`initial_scale` must be positive .*'auto'"):
        LossScaleOptimizer(keras.optimizers.SGD(), dynamic=False, initial_scale="auto")
