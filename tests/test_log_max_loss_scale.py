"""`LogMaxLossScale` against its formula in float64."""

import numpy as np
import pytest
from keras import ops

from keras_lso.loss_scales import LogMaxLossScale

# Moving averages of some thousand steps in float32: an exponent of at most 16 is then
# off by less than 1e-4, half of which is what the scale is off by.
RTOL = 1e-4


def model(steps, x_of_overflow=16.0, slow_beta=0.999):
    """Yields the scale before the first step and after each, from (finite, amax)."""
    yield 1.0
    mean = slow = square = 0.0
    for t, (finite, amax) in enumerate(steps, start=1):
        x = np.log2(amax) if finite else x_of_overflow
        mean = 0.99 * mean + 0.01 * x
        slow = slow_beta * slow + (1 - slow_beta) * x
        square = slow_beta * square + (1 - slow_beta) * x * x
        fast_correction, correction = 1 - 0.99**t, 1 - slow_beta**t
        sigma = max(square / correction - (slow / correction) ** 2, 0) ** 0.5
        exponent = 16 - (mean / fast_correction + 3.09 * sigma)
        yield np.clip(2.0 ** min(exponent, 100.0), 1.0, 2.0**14)


def made_up(steps, overflows=()):
    """Returns steps whose largest gradients are log-normal, and those that overflow."""
    logs = np.random.default_rng(7).normal(4.0, 1.0, size=steps)
    return [(i not in overflows, np.float32(2.0**x)) for i, x in enumerate(logs)]


def trajectory(policy, steps, compile_=None):
    policy.build()
    step = compile_(policy.step, policy.variables) if compile_ else policy.step
    scales = [float(policy())]
    for finite, amax in steps:
        # The result of `measure` if a gradient is not finite.
        amax = ops.convert_to_tensor(np.float32(amax if finite else np.nan))
        step(ops.convert_to_tensor(finite), amax)
        scales.append(float(policy()))
    return scales


def test_log_max_scale_matches_float64_formula(compiled):
    steps = made_up(400, overflows=[0, 1, 70, 300])
    scales = trajectory(LogMaxLossScale(), steps, compiled)
    np.testing.assert_allclose(scales, list(model(steps)), rtol=RTOL)
    # Most are not at the bounds, where any formula would be right.
    assert sum(1.0 < scale < 2.0**14 for scale in scales) > 300


def test_original_overflow_pins_scale_for_hundreds_of_steps(compiled_once):
    steps = made_up(600, overflows=[100])
    policy = LogMaxLossScale(original_overflow=True)
    original = trajectory(policy, steps, compiled_once)
    np.testing.assert_allclose(original, list(model(steps, 2.0**16)), rtol=1e-3)
    assert set(original[101:]) == {1.0}
    ours = trajectory(LogMaxLossScale(), steps[:200], compiled_once)
    assert min(ours[101:]) > 100.0


def test_first_magnitude_has_no_spread_for_any_beta2(compiled_once):
    """In float32 `(1 - beta2) / (1 - beta2**1)` is below 1 for every fifth of them."""
    steps = [(True, np.float32(2.0**-6))]
    for beta2 in np.linspace(0.05, 0.9999, 40).tolist():
        policy = LogMaxLossScale(scale_max=2.0**24, beta2=beta2)
        _, scale = trajectory(policy, steps, compiled_once)
        assert scale == pytest.approx(2.0**22, rel=1e-6), beta2


@pytest.mark.parametrize("before", [0, 5])
def test_all_zero_gradients_leave_policy_state_unchanged(before, compiled, snapshot):
    policy = LogMaxLossScale()
    trajectory(policy, made_up(before))
    step = compiled(policy.step, policy.variables)
    state = snapshot(policy.variables)
    step(ops.convert_to_tensor(True), ops.convert_to_tensor(np.float32(0.0)))
    assert snapshot(policy.variables) == state
    # The next step counts as if that one had not happened.
    step(ops.convert_to_tensor(True), ops.convert_to_tensor(np.float32(16.0)))
    twin = LogMaxLossScale()
    expected = trajectory(twin, [*made_up(before), (True, 16.0)])[-1]
    assert float(policy()) == pytest.approx(expected, rel=1e-6)


def test_flagged_overflow_with_zero_amax_counts_as_overflow():
    policy = LogMaxLossScale()
    policy.build()
    policy.step(False, ops.convert_to_tensor(np.float32(0.0)))
    assert int(policy.step_counter.numpy()) == 1
    assert float(policy()) == 1.0  # 2**(16 - log_max)


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3e38])
def test_extreme_float32_magnitudes_keep_state_finite(amax):
    policy = LogMaxLossScale(scale_min=2.0**-120, scale_max=2.0**120)
    scales = trajectory(policy, [(True, np.float32(amax))] * 3)
    assert np.all(np.isfinite(scales))
    assert all(np.isfinite(v.numpy()) for v in policy.variables)


def test_initial_scale_is_one_clipped_to_bounds():
    assert float(LogMaxLossScale()()) == 1.0
    assert float(LogMaxLossScale(scale_min=4.0)()) == 4.0
    assert float(LogMaxLossScale(scale_min=0.1, scale_max=0.5)()) == 0.5


@pytest.mark.parametrize(
    "name, value",
    [
        *((name, np.nan) for name in ("mean", "slow_mean", "variance")),
        *((name, np.inf) for name in ("mean", "slow_mean", "variance")),
        ("variance", -1),
        ("step_counter", -1),
    ],
)
def test_restore_resets_non_finite_or_negative_loaded_state(name, value):
    policy = LogMaxLossScale()
    trajectory(policy, made_up(5))
    getattr(policy, name).assign(value)
    policy.restore()
    assert state(policy) == [0.0] * 4


def state(policy):
    return [float(v.numpy()) for v in policy.variables if v is not policy.scale]


@pytest.mark.parametrize("arguments", [{}, {"log_max": 63.0}, {"log_max": 1e4}])
def test_overflows_keep_scale_finite_and_within_bounds(arguments):
    is_original = arguments.get("log_max", 0.0) < 64.0
    policy = LogMaxLossScale(original_overflow=is_original, **arguments)
    policy.build()
    # Flagged, or visible only in the magnitude.
    for finite, amax in [(False, np.nan), (True, np.inf), (True, np.nan), (True, 2.0)]:
        policy.step(finite, ops.convert_to_tensor(np.float32(amax)))
        assert 1.0 <= float(policy()) <= 2.0**14
    assert all(np.isfinite(v.numpy()) for v in policy.variables)
    assert int(policy.step_counter.numpy()) == 4
