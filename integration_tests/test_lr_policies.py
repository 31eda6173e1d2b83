"""OpenSeq2Seq's learning-rate policies give the rates of the original.

The reference is its functions, applied to an array of steps. They call the decays of
TF1, or else are written in NumPy here. Tolerance: as in `test_schedules.py`.
"""

import numpy as np
import pytest
from keras import ops

from keras_lso.compat.open_seq2seq import lr_policies

EPSILON = float(np.finfo("float32").eps)
STEPS = np.arange(40, dtype="int32")


def tf1(name, rate, steps, *arguments):
    """Calls a decay of TF1, which returns a function when it runs eagerly."""
    import tensorflow as tf

    decay = getattr(tf.compat.v1.train, name)
    return decay(tf.constant(rate), tf.constant(steps), *arguments)().numpy()


def warmed_up(steps, rate, warmup_steps):
    if warmup_steps == 0:
        return np.full(steps.shape, rate, "float32")
    line = np.float32(rate) * steps.astype("float32") / np.float32(warmup_steps)
    return np.where(steps < warmup_steps, line, np.float32(rate))


def original_exp_decay(steps, rate, decay_steps, decay_rate, stairs, begin, min_lr):
    rates = warmed_up(steps, rate, 0)
    later = np.maximum(steps - begin, 0)
    decayed = tf1("exponential_decay", rates, later, decay_steps, decay_rate, stairs)
    return np.maximum(np.float32(min_lr), np.where(steps < begin, rates, decayed))


def original_poly_decay(steps, rate, decay_steps, power, begin, min_lr, warmup_steps):
    rates = warmed_up(steps, rate, warmup_steps)
    later = np.maximum(steps - begin, 0)
    decayed = tf1("polynomial_decay", rates, later, decay_steps, min_lr, power)
    return np.where(steps < begin, rates, decayed)


def original_cosine_decay(steps, rate, decay_steps, power, begin, min_lr, warmup_steps):
    rates = warmed_up(steps, rate, warmup_steps)
    later = np.maximum(steps - begin, 0)
    decayed = tf1("cosine_decay", rates, later, decay_steps, min_lr)
    return np.where(steps < begin, rates, decayed)


def original_inv_poly_decay(steps, rate, decay_steps, min_lr, power):
    lowest = min(max(min_lr, 1e-8), rate)
    scale = ((rate / lowest) ** (1 / power) - 1) / decay_steps
    # Its code continues below the minimum; its page says that the rate stays there.
    steps = np.minimum(steps, decay_steps)
    return (rate / (1 + scale * steps) ** power).astype("float32")


def original_transformer_policy(
    steps, rate, d_model, warmup_steps, max_lr, coefficient
):
    count = steps + 1.0
    decay = np.minimum(count * warmup_steps**-1.5, count**-0.5)
    rates = coefficient * d_model**-0.5 * decay * rate
    return np.minimum(np.inf if max_lr is None else max_lr, rates).astype("float32")


def original_piecewise_constant(
    steps, rate, boundaries, decay_rates, steps_per_epoch=1
):
    import tensorflow as tf

    boundaries = [int(epoch * steps_per_epoch) for epoch in boundaries]
    values = [np.float32(rate * decay) for decay in [1.0, *decay_rates]]
    decay = tf.compat.v1.train.piecewise_constant
    return np.array([decay(tf.constant(i), boundaries, values)() for i in steps])


BEGINS, WARMUPS = (0, 1, 9, 50), (0, 1, 4, 9, 15, 50)
WITH_A_WARMUP = [
    (0.8, decay_steps, power, begin, min_lr, warmup_steps)
    for decay_steps, power, min_lr in [
        (20, 1.0, 0.0),
        (20, 2.0, 0.05),
        (7, 0.5, 0.9),
        (1, 1.0, 0.1),
        (300, 3.0, 0.0),
    ]
    for begin in BEGINS
    for warmup_steps in WARMUPS
]
ORIGINALS = {
    "exp_decay": original_exp_decay,
    "poly_decay": original_poly_decay,
    "cosine_decay": original_cosine_decay,
    "inv_poly_decay": original_inv_poly_decay,
    "transformer_policy": original_transformer_policy,
}
ARGUMENTS = {
    "exp_decay": [
        (0.8, decay_steps, decay_rate, stairs, begin, min_lr)
        for decay_steps, decay_rate in [(7, 0.6), (1, 0.9), (20, 1.5)]
        for stairs in (False, True)
        for begin in BEGINS
        for min_lr in (0.0, 0.1, 0.9)
    ],
    "poly_decay": WITH_A_WARMUP,
    "cosine_decay": WITH_A_WARMUP,
    "inv_poly_decay": [
        (0.8, decay_steps, min_lr, power)
        for decay_steps in (1, 20, 300)
        for min_lr in (0.0, 0.05, 0.9)
        for power in (0.5, 1.0, 3.0)
    ],
    "transformer_policy": [
        (2.0, 16, warmup_steps, max_lr, coefficient)
        for warmup_steps in (1, 8, 300)
        for max_lr in (None, 0.15)
        for coefficient in (1.0, 0.3)
    ],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_rates_of_policy_match_open_seq2seq(name, original):
    def run():
        return [ORIGINALS[name](STEPS, *arguments) for arguments in ARGUMENTS[name]]

    for arguments, expected in zip(ARGUMENTS[name], original(run), strict=True):
        # The arithmetic is elementwise, so one call serves all steps.
        rates = getattr(lr_policies, name)(ops.convert_to_tensor(STEPS), *arguments)
        assert np.isfinite(expected).all() and expected.dtype == np.float32
        np.testing.assert_allclose(
            ops.convert_to_numpy(rates),
            expected,
            rtol=8 * EPSILON,
            atol=4 * EPSILON * expected.max(),
            err_msg=f"{name}{arguments}",
        )


@pytest.mark.parametrize(
    "arguments",
    [(0.8, [6, 19], [0.5, 0.125]), (0.8, [3, 9.5], [0.5, 0.125], 2), (0.8, [0], [3.0])],
)
def test_rates_of_piecewise_constant_match_open_seq2seq(arguments, original):
    rates = [lr_policies.piecewise_constant(step, *arguments) for step in STEPS]
    expected = original(lambda: original_piecewise_constant(STEPS, *arguments))
    np.testing.assert_array_equal([ops.convert_to_numpy(r) for r in rates], expected)


def test_fixed_lr_returns_its_rate_and_rejects_unknown_arguments():
    assert float(lr_policies.fixed_lr(7, learning_rate=0.5)) == 0.5
    with pytest.raises(TypeError, match="decay_steps"):
        lr_policies.fixed_lr(7, 0.5, decay_steps=3)
