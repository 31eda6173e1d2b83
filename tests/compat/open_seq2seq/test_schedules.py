"""OpenSeq2Seq's learning-rate policies: epochs, arguments at the edge, dtypes.

`tests/schedules/` compares every schedule with its formula, and
`integration_tests/test_lr_policies.py` with the original.
"""

import keras
import numpy as np
import pytest

from keras_lso.compat.open_seq2seq import (
    ExpDecay,
    InvPolyDecay,
    PiecewiseConstant,
    PolyDecay,
    TransformerPolicy,
)


def at(schedule, steps):
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (
            PiecewiseConstant(0.8, [2, 4], [0.5, 0.25], steps_per_epoch=10),
            {20: 0.8, 21: 0.4, 40: 0.4, 41: 0.2},
        ),
        # 7.5 steps and 29 steps, though 0.29 * 100 is below 29 in binary.
        (PiecewiseConstant(0.8, [2.5], [0.5], 3), {7: 0.8, 8: 0.4}),
        (PiecewiseConstant(0.8, [0.29], [0.5], 100), {29: 0.8, 30: 0.4}),
        # k = (16 ** (1 / 2) - 1) / 3 = 1
        (
            InvPolyDecay(0.8, 3, 0.05, power=2.0, begin_decay_at=4, warmup_steps=2),
            {0: 0.0, 1: 0.4, 2: 0.8, 4: 0.8, 5: 0.2, 7: 0.05, 8: 0.05},
        ),
        # A minimum above the rate.
        (InvPolyDecay(0.8, 5, 0.9), {0: 0.8, 3: 0.8, 5: 0.8, 6: 0.8}),
        (InvPolyDecay(0.0, 5, 0.0), {0: 0.0, 3: 0.0}),
    ],
)
def test_rates_match_worked_examples(schedule, expected):
    # There is room for 0.0.
    np.testing.assert_allclose(
        at(schedule, expected), list(expected.values()), rtol=1e-6, atol=1e-12
    )


def test_extreme_exponents_never_give_nan_rate():
    steps = (1, 2, 3, 2**24, 2**31 - 2)
    assert at(ExpDecay(0.3, 1, 1e-37, False), steps)[1:] == [0.0] * 4
    assert at(ExpDecay(0.3, 1, 3e38, False), steps)[1:] == [np.inf] * 4
    assert at(PolyDecay(0.3, 3, power=1e38), steps) == [0.0] * 5
    # There is no accuracy left in such powers, but there are bounds.
    for power in (1e-3, 1e3):
        for decay_steps in (3, 2**31 - 1):
            rates = at(InvPolyDecay(0.3, decay_steps, 1e-5, power), steps)
            assert np.all(np.diff(rates) <= 0)
            assert np.float32(1e-5) <= rates[-1] <= rates[0] <= np.float32(0.3)


@pytest.mark.parametrize("kind", [str, lambda name: np.dtype(name).type])
@pytest.mark.parametrize("name", ["float16", "float32"])
def test_rate_has_requested_dtype(kind, name):
    policy = TransformerPolicy(2.0, 512, 4000, dtype=kind(name))
    restored = TransformerPolicy.from_config(policy.get_config())
    assert policy.dtype == restored.dtype == name
    rate = restored(69_999)
    assert keras.backend.standardize_dtype(rate.dtype) == name
    # Step 70,000 is none in float16: the rate is computed in float32.
    expected = np.dtype(name).type(2 * 512**-0.5 * 70_000**-0.5)
    np.testing.assert_allclose(float(rate), expected, rtol=1e-6)


def test_boundaries_in_epochs_stay_epochs_in_config():
    policy = PiecewiseConstant(1.0, [1, 2.5], [0.5, 0.1], steps_per_epoch=4)
    config = policy.get_config()
    assert (config["boundaries"], config["steps_per_epoch"]) == ([1.0, 2.5], 4)
    # Two epochs of the same step.
    with pytest.raises(ValueError, match="must be strictly increasing"):
        PiecewiseConstant(1.0, [1, 1.1], [0.5, 0.1], steps_per_epoch=4)
