"""Clipping by the inner optimizer's arguments, in a step in one pass.

With `global_clipnorm` the norm of all gradients is the check whether they are finite,
and the factor by which they are clipped enters the one by which they are unscaled. With
`clipnorm` and `clipvalue` each gradient is unscaled and clipped before the step.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._keras_internals.rules import registered_rule
from keras_lso.loss_scales import LogMaxLossScale
from testing.beside_keras import SCALE, SHAPES, Pair, bits, steps_by_rule

K = keras.optimizers
LIMIT = 0.5
MAKE = {
    "SGD": lambda rate: K.SGD(rate, global_clipnorm=LIMIT),
    "momentum": lambda rate: K.SGD(rate, momentum=0.9, global_clipnorm=LIMIT),
    "Adam": lambda rate: K.Adam(rate, global_clipnorm=LIMIT),
    "AdamW": lambda rate: K.AdamW(rate, global_clipnorm=LIMIT),
    "Lion": lambda rate: K.Lion(rate, global_clipnorm=LIMIT),
    "momentum, each norm": lambda rate: K.SGD(rate, momentum=0.9, clipnorm=LIMIT),
    "AdamW, each norm": lambda rate: K.AdamW(rate, clipnorm=LIMIT),
    "momentum, each value": lambda rate: K.SGD(rate, momentum=0.9, clipvalue=0.05),
    "AdamW, each value": lambda rate: K.AdamW(rate, clipvalue=0.05),
    "Lamb": lambda rate: K.Lamb(rate, global_clipnorm=LIMIT),
    "LAMB": lambda rate: keras_lso.LAMB(rate, global_clipnorm=LIMIT),
    "LARS, each norm": lambda rate: keras_lso.LARS(10.0, clipnorm=LIMIT),
    "NovoGrad, each value": lambda rate: keras_lso.NovoGrad(rate, clipvalue=0.05),
}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def gradients(norm, seed=1):
    random = np.random.default_rng(seed)
    grads = [random.normal(size=s) for s in SHAPES]
    length = np.sqrt(sum(np.square(g).sum() for g in grads))
    return [(g * norm / length).astype("float32") for g in grads]


@each
def test_clipped_steps_match_keras(make, way):
    pair = Pair(make)
    for norm in (0.01, 0.499, 0.501, 40.0, 0.0):
        pair.step_by(gradients(norm))
        pair.assert_alike(4e-6)
    assert int(pair.optimizer.skipped_steps) == 0
    has_norms = registered_rule(pair.inner).has_norms
    is_by_rule = has_norms or keras.backend.backend() != "jax"
    assert steps_by_rule(pair.optimizer) is is_by_rule


@pytest.mark.parametrize("name", ["global_clipnorm", "clipnorm", "clipvalue"])
def test_clipping_limit_is_read_at_each_step(name):
    pair = Pair(K.SGD, momentum=0.9)
    for limit in (0.5, 2.0, 0.125, None, 0.01):
        for clipping in (pair.optimizer.inner_optimizer, pair.inner):
            setattr(clipping, name, limit)
        pair.step_by(gradients(4.0))
        pair.assert_alike(1e-6)


@each
def test_clipped_steps_on_float16_gradients_match_keras_in_float32(make, way):
    """Against NumPy's norm of what float16 has left of the gradients."""
    pair = Pair(make, "float16", scale=256.0)
    for norm in (0.01, 40.0):
        narrow = [(g * 256).astype("float16") for g in gradients(norm)]
        pair.step_by([g.astype("float32") / 256 for g in narrow], "float16")
    pair.assert_weights_alike_in_float16()


@each
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_overflow_in_clipped_step_leaves_weights_and_slots_unchanged(make, bad, way):
    pair = Pair(make)
    pair.apply(gradients(4.0))
    pair.overflow(bad)
    assert int(pair.optimizer.skipped_steps) == 1
    assert float(pair.optimizer.loss_scale) == SCALE / 2


IN_THEIR_OWN_STEP = {
    "Adadelta": lambda rate: K.Adadelta(rate, global_clipnorm=LIMIT),
    "LARS": lambda rate: keras_lso.LARS(rate, global_clipnorm=LIMIT),
}


@pytest.mark.parametrize("name", ["momentum", "Adam", *IN_THEIR_OWN_STEP])
def test_overflow_of_global_norm_skips_step(name):
    """Keras would make NaN of it: gradients of 1e25 are finite, their squares not."""
    pair = Pair((MAKE | IN_THEIR_OWN_STEP)[name])
    before, grads = bits(pair.ours), gradients(1e25)
    given = [ops.convert_to_tensor(g) for g in grads]
    pair.optimizer.apply(given, pair.ours, scaled=False)
    assert bits(pair.ours) == before
    assert int(pair.optimizer.skipped_steps) == 1
    pair.apply_to_keras(grads)
    assert np.isnan(ops.convert_to_numpy(pair.theirs[0])).all()


@pytest.mark.parametrize("name", ["Adam", *IN_THEIR_OWN_STEP])
def test_overflow_of_unscaled_global_norm_skips_step(name):
    """Squares of gradients of 1e18 are finite; those of 1024 times as large are not."""
    pair = Pair((MAKE | IN_THEIR_OWN_STEP)[name], scale=2.0**-10)
    before = bits(pair.ours)
    pair.apply(gradients(1e18 * 2.0**10))
    assert int(pair.optimizer.skipped_steps) == 1
    assert bits(pair.ours) == before


@pytest.mark.parametrize("name", ["momentum", *IN_THEIR_OWN_STEP])
def test_step_depends_on_norm_of_unscaled_gradients_alone(name):
    """The square of the scaled norm exceeds float32, and that of the norm does not."""
    pair = Pair((MAKE | IN_THEIR_OWN_STEP)[name], scale=2.0**15)
    pair.step_by(gradients(7e14))
    assert int(pair.optimizer.skipped_steps) == 0
    pair.assert_alike(1e-6)


def test_clipping_limits_set_after_init_follow_keras_precedence(way):
    pair = Pair(K.SGD)
    for clipping in (pair.optimizer.inner_optimizer, pair.inner):
        clipping.clipvalue, clipping.global_clipnorm = 1e-4, 0.2
    for norm in (0.1, 4.0):
        pair.step_by(gradients(norm))
        pair.assert_alike(1e-6)


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue"])
def test_clipnorm_and_clipvalue_clip_mean_of_window_as_in_keras(name, way):
    pair = Pair(K.SGD, gradient_accumulation_steps=2, **{name: 0.05})
    for seed in range(4):
        pair.step_by(gradients(30.0, seed))
        pair.assert_alike(1e-6)


def test_clipnorm_of_large_gradients_matches_keras_despite_scale():
    """The square of a gradient of 1e17 is finite, but not once it is scaled."""
    pair = Pair(MAKE["momentum, each norm"])
    pair.step_by(gradients(1e17))
    pair.assert_alike(1e-6)


def test_policy_receives_largest_gradient_before_clipping():
    seen = []

    class Listening(LogMaxLossScale):
        def step(self, finite, amax=None):
            seen.append(float(amax))
            super().step(finite, amax)

    inner = K.SGD(0.1, global_clipnorm=LIMIT)
    optimizer = keras_lso.LossScaleOptimizer(inner, loss_scale=Listening())
    grads = gradients(40.0)
    ours = [keras.Variable(np.ones(g.shape, "float32")) for g in grads]
    optimizer.apply([ops.convert_to_tensor(g) for g in grads], ours)
    # Of the gradients as they come, before they are clipped.
    np.testing.assert_allclose(seen, [max(np.abs(g).max() for g in grads)], rtol=1e-6)
