"""OpenSeq2Seq's learning-rate policies: the formulas, float32's accuracy, dtypes.

Configs, steps, traces and errors are tested for every schedule in `tests/schedules/`.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat.open_seq2seq import (
    CosineDecayPolicy,
    ExpDecay,
    FixedLR,
    InvPolyDecay,
    PiecewiseConstant,
    PolyDecay,
    TransformerPolicy,
)

BACKEND = keras.backend.backend()
LAST_STEP = 1_000_000
SMALLEST = float(np.finfo("float32").tiny)


def at(schedule, steps):
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (FixedLR(0.25), {0: 0.25, 10**6: 0.25}),
        # A boundary belongs to the interval before it.
        (
            PiecewiseConstant(0.8, [2, 4], [0.5, 0.25]),
            {0: 0.8, 2: 0.8, 3: 0.4, 4: 0.4, 5: 0.2, 99: 0.2},
        ),
        (
            PiecewiseConstant(0.8, [2, 4], [0.5, 0.25], steps_per_epoch=10),
            {20: 0.8, 21: 0.4, 40: 0.4, 41: 0.2},
        ),
        # 7.5 steps and 29 steps, though 0.29 * 100 is below 29 in binary.
        (PiecewiseConstant(0.8, [2.5], [0.5], 3), {7: 0.8, 8: 0.4}),
        (PiecewiseConstant(0.8, [0.29], [0.5], 100), {29: 0.8, 30: 0.4}),
        # The minimum is one also before the decay.
        (ExpDecay(0.8, 1, 0.5, False, 2, 0.3), {0: 0.8, 2: 0.8, 3: 0.4, 4: 0.3}),
        (PolyDecay(0.8, 2, power=2.0, min_lr=0.4), {0: 0.8, 1: 0.5, 2: 0.4, 3: 0.4}),
        (
            PolyDecay(0.8, 4, begin_decay_at=1, min_lr=0.2, warmup_steps=4),
            {0: 0.0, 1: 0.2, 2: 0.35, 3: 0.4, 4: 0.35, 5: 0.2, 6: 0.2},
        ),
        # k = (16 ** (1 / 2) - 1) / 3 = 1
        (
            InvPolyDecay(0.8, 3, 0.05, power=2.0, begin_decay_at=4, warmup_steps=2),
            {0: 0.0, 1: 0.4, 2: 0.8, 4: 0.8, 5: 0.2, 7: 0.05, 8: 0.05},
        ),
        # A minimum above the rate.
        (InvPolyDecay(0.8, 5, 0.9), {0: 0.8, 3: 0.8, 5: 0.8, 6: 0.8}),
        (InvPolyDecay(0.0, 5, 0.0), {0: 0.0, 3: 0.0}),
        # The minimum is a share, the power has no effect.
        (
            CosineDecayPolicy(0.8, 4, power=3.0, min_lr=0.25),
            {0: 0.8, 2: 0.5, 4: 0.2, 5: 0.2},
        ),
        (
            TransformerPolicy(2.0, 16, 4, max_lr=0.05, coefficient=0.5),
            {0: 0.03125, 1: 0.05, 3: 0.05, 15: 0.05, 63: 0.03125},
        ),
    ],
)
def test_rates_match_worked_examples(schedule, expected):
    # There is room for 0.0.
    np.testing.assert_allclose(
        at(schedule, expected), list(expected.values()), rtol=1e-6, atol=1e-12
    )


def waiting(step, lr, decayed, begin=0, warmup=0):
    rate = np.where(step < warmup, lr * step / max(warmup, 1), lr)
    return np.where(step < begin, rate, decayed(rate, np.maximum(step - begin, 0)))


def exp_decay(step, lr, decay_steps, decay_rate, stairs, begin_decay_at=0, min_lr=0.0):
    def decayed(rate, step):
        exponent = step // decay_steps if stairs else step / decay_steps
        return rate * np.float64(decay_rate) ** exponent

    return np.maximum(min_lr, waiting(step, lr, decayed, begin_decay_at))


def poly_decay(step, lr, decay_steps, power=1.0, begin=0, min_lr=0.0, warmup=0):
    def decayed(rate, step):
        left = 1 - np.minimum(step, decay_steps) / decay_steps
        return (rate - min_lr) * left**power + min_lr

    return waiting(step, lr, decayed, begin, warmup)


def inv_poly_decay(step, lr, decay_steps, min_lr, power=1.0, begin=0, warmup=0):
    min_lr = np.clip(min_lr, 1e-8, lr)
    k = ((lr / min_lr) ** (1 / power) - 1) / decay_steps

    def decayed(rate, step):
        return np.maximum(rate / (1 + k * step) ** power, min_lr)

    return waiting(step, lr, decayed, max(begin, warmup), warmup)


def cosine_decay(step, lr, decay_steps, power=1.0, begin=0, min_lr=0.0, warmup=0):
    def decayed(rate, step):
        # (1 + cos(x)) / 2 in another form: float64 would lose the last steps.
        left = 1 - np.minimum(step, decay_steps) / decay_steps
        cosine = np.sin(np.pi / 2 * left) ** 2
        return rate * ((1 - min_lr) * cosine + min_lr)

    return waiting(step, lr, decayed, begin, warmup)


def transformer_policy(step, lr, d_model, warmup, max_lr=None, coefficient=1.0):
    step = step + 1.0
    rate = coefficient * d_model**-0.5 * np.minimum(step * warmup**-1.5, step**-0.5)
    return np.minimum(lr * rate, np.inf if max_lr is None else max_lr)


# The class, the transcription of its formula, and the arguments of both.
ACCURACY = {
    "exp": (ExpDecay, exp_decay, (0.3, 1, 0.99998, False)),
    "exp-stairs": (ExpDecay, exp_decay, (0.3, 33_333, 0.7, True, 1000)),
    "poly-square": (PolyDecay, poly_decay, (0.3, 123_457, 2.0, 5000, 1e-5, 3000)),
    "poly-very-steep": (PolyDecay, poly_decay, (0.3, 999_983, 150.1)),
    "inv-poly-far": (InvPolyDecay, inv_poly_decay, (3.0, 999_983, 0.0, 0.5, 17)),
    "inv-poly-steep": (InvPolyDecay, inv_poly_decay, (0.3, 999_983, 1e-8, 97.3)),
    "cosine-warm": (
        CosineDecayPolicy,
        cosine_decay,
        (0.3, 123_457, 1.0, 0, 0.01, 999_983),
    ),
    "transformer-capped": (
        TransformerPolicy,
        transformer_policy,
        (2.0, 1000, 8001, 5e-4, 0.7),
    ),
}


def some_steps(seed=0):
    """The first and last ones, those around a boundary of the cases, and random ones"""
    random = np.random.default_rng(seed)
    boundaries = [0, 7, 11, 777, 1000, 3000, 4000, 5000, 8001, 54_321 + 777, 123_457]
    boundaries += [128_457, 33_333 + 1000, 654_321 + 5000, 999_983, LAST_STEP]
    near = np.add.outer(boundaries, np.arange(-8, 9)).ravel()
    scattered = random.integers(0, LAST_STEP, 400)
    small = (10 ** random.uniform(0, 6, 200)).astype(int)
    steps = np.concatenate([near, scattered, small])
    return np.unique(steps.clip(0, LAST_STEP))


@pytest.mark.parametrize("case", ACCURACY)
def test_rate_has_accuracy_of_float32(case, compiled):
    make, formula, arguments = ACCURACY[case]
    steps = some_steps()
    expected = formula(steps, *arguments)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 3
    # The arithmetic is elementwise, so one call serves all steps.
    tensor = ops.convert_to_tensor(steps.astype("int32"))
    actual = ops.convert_to_numpy(compiled(make(*arguments), [])(tensor))
    assert actual.dtype == np.float32
    # A rounding of the base or the exponent, 6e-8, is multiplied by the power (150
    # here) or by the exponent (up to 87, beyond which the rate is 0).
    np.testing.assert_allclose(actual, expected, rtol=3e-5, atol=SMALLEST)


def test_extreme_exponents_never_give_nan_rate():
    steps = (1, 2, 3, 2**24, 2**31 - 2)
    assert at(ExpDecay(0.3, 1, 1e-300, False), steps) == [0.0] * 5
    assert at(ExpDecay(0.3, 1, 1e300, False), steps) == [np.inf] * 5
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


def test_dtype_that_is_not_float_is_rejected():
    with pytest.raises(ValueError, match="Argument `dtype` must be a dtype of floats"):
        TransformerPolicy(1.0, 16, 4, dtype="int32")


def test_boundaries_in_epochs_stay_epochs_in_config():
    policy = PiecewiseConstant(1.0, [1, 2.5], [0.5, 0.1], steps_per_epoch=4)
    config = policy.get_config()
    assert (config["boundaries"], config["steps_per_epoch"]) == ([1.0, 2.5], 4)
    # Two epochs of the same step.
    with pytest.raises(ValueError, match="must be strictly increasing"):
        PiecewiseConstant(1.0, [1, 1.1], [0.5, 0.1], steps_per_epoch=4)
