"""What `LAMB` alone promises: numbers by hand, bounds of the trust ratio, `epsilon`."""

import keras
import numpy as np
import pytest

from keras_lso import LAMB
from testing.layer_wise import (
    InNumPyLAMB,
    assert_close,
    make_variables,
    values_of,
    variable,
)
from testing.optimizer_steps import apply
from testing.tensors import tensor


def test_lamb_step_matches_hand_computed_values():
    # Without bias correction m is 4 and v 16; d is 4 / (4 + 4) + 0.5 * (3, 4).
    w = variable("w", [3.0, 4.0])
    optimizer = LAMB(0.5, 0.5, 0.75, 4.0, 0.5, bias_correction=False)
    apply(optimizer, [[8.0, 8.0]], [w])
    d = np.array([2.0, 2.5])
    assert_close([w], [[3.0, 4.0] - 0.5 * 5.0 / np.linalg.norm(d) * d])
    assert values_of(optimizer.momentums)[0].tolist() == [4.0, 4.0]
    assert values_of(optimizer.velocities)[0].tolist() == [16.0, 16.0]
    slots = [v.name for v in optimizer.variables[2:]]
    assert slots == ["w_momentum", "w_velocity"]


@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
def test_trust_ratio_is_one_where_norm_is_zero_whatever_its_bounds(wrap, zero):
    """As in DeepSpeed, which has bounds."""
    w = np.zeros(2) if zero != "gradients" else np.array([3.0, 4.0])
    g = np.zeros(2) if zero != "weights" else np.array([8.0, -8.0])
    inner = LAMB(0.5, 0.5, 0.75, 4.0, bias_correction=False, min_trust_ratio=3.0)
    [v] = make_variables([w])
    apply(wrap(inner), [g], [v])
    assert values_of([v])[0].tolist() == (w - 0.5 * g / 16).tolist()


@pytest.mark.parametrize("bounds, ratio", [((None, 2.0), 2.0), ((6.0, None), 6.0)])
def test_trust_ratio_is_clipped_to_bounds(wrap, bounds, ratio):
    # |w| is 5, |d| is 1.
    w = variable("w", [3.0, 4.0])
    lower, upper = bounds
    inner = LAMB(0.125, min_trust_ratio=lower, max_trust_ratio=upper)
    apply(wrap(inner), [[2.0, 0.0]], [w])
    assert_close([w], [[3.0 - 0.125 * ratio, 4.0]])


def test_epsilon_zero_is_replaced_by_keras_default():
    assert LAMB(epsilon=0).epsilon == keras.config.epsilon()


def test_trust_ratios_predict_next_step(start, gradients):
    variables, optimizer = make_variables(start), LAMB(0.1, exclude_1d=True)
    optimizer.build(variables)
    for number, grads in enumerate(gradients[:2]):
        ratios = optimizer.trust_ratios([tensor(g) for g in grads])
        [[path, ratio]] = ratios.items()
        assert path == variables[0].path
        before = values_of(variables)[0]
        apply(optimizer, grads, variables)
        step = np.linalg.norm(before - values_of(variables)[0])
        # A step is as long as the rate times |w|, and |d| what it is then divided by.
        moments = InNumPyLAMB(start)
        for g in gradients[: 1 + number]:
            moments.step(g, 0.0)
        m = moments.m[0] / (1 - np.float32(0.9) ** moments.t)
        v = moments.v[0] / (1 - np.float32(0.999) ** moments.t)
        d = np.linalg.norm(m / (np.sqrt(v) + 1e-6))
        assert float(ratio) == pytest.approx(step / 0.1 / d, rel=1e-5)
