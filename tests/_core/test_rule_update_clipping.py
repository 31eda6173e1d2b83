"""Clipping by the inner optimizer's arguments, in fused steps beside Keras's own.

With `global_clipnorm` the norm of all gradients is also the finite check, and the
clipping factor is multiplied by the one that unscales. With `clipnorm` and `clipvalue`
each gradient is unscaled and clipped before the step.
"""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso._keras_internals.rules import registered_rule
from keras_lso.loss_scales import LogMaxLossScale
from testing.harness import BACKEND, SCALE, BesideKeras, Harness, steps_by_rule

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


@each
def test_clipped_steps_match_keras(make, way):
    run = BesideKeras(make)
    for norm in (0.01, 0.499, 0.501, 40.0, 0.0):
        run.step(norm=norm)
        run.assert_alike(4e-6)
    run.overflow(-np.inf)
    assert run.scale == SCALE / 2
    is_by_rule = registered_rule(run.inner).has_norms or BACKEND != "jax"
    assert steps_by_rule(run.optimizer) is is_by_rule


@each
def test_clipped_steps_on_float16_gradients_match_keras_in_float32(make, way):
    run = BesideKeras(make, "float16", scale=256.0)
    for norm in (0.01, 40.0):
        run.step(norm=norm)
    run.assert_weights_alike_in_float16()


LIMITS = {
    # All are read at each step.
    "global_clipnorm": [{"global_clipnorm": x} for x in (0.5, 2.0, 0.125, None, 0.01)],
    "clipnorm": [{"clipnorm": x} for x in (0.5, 2.0, 0.125, None, 0.01)],
    "clipvalue": [{"clipvalue": x} for x in (0.5, 2.0, 0.125, None, 0.01)],
    # As in Keras, one of two takes precedence.
    "two": [{"clipvalue": 1e-4, "global_clipnorm": 0.2}] * 2,
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_clipping_limits_are_read_at_each_step_as_in_keras(limits, way):
    run = BesideKeras(K.SGD, momentum=0.9)
    for limit, norm in zip(limits, (0.1, 4.0, 4.0, 4.0, 4.0), strict=False):
        run.set(**limit)
        run.step(norm=norm)
        run.assert_alike(1e-6)


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue"])
def test_clipnorm_and_clipvalue_clip_accumulated_mean_as_in_keras(name, way):
    run = BesideKeras(K.SGD, gradient_accumulation_steps=2, **{name: 0.05})
    for _ in range(4):
        run.step(norm=30.0)
        run.assert_alike(1e-6)


OWN_STEP = {
    "Adadelta": lambda rate: K.Adadelta(rate, global_clipnorm=LIMIT),
    "LARS": lambda rate: keras_lso.LARS(rate, global_clipnorm=LIMIT),
}


@pytest.mark.parametrize("name", ["momentum", "Adam", *OWN_STEP])
@pytest.mark.parametrize(
    "norm, scale",
    [
        # Finite gradients with squares of inf, of which Keras makes NaN.
        (1e25, 1.0),
        # Finite squares, but not once they are unscaled.
        (1e18 * 2.0**10, 2.0**-10),
    ],
)
def test_overflow_of_global_norm_skips_step(name, norm, scale):
    run = BesideKeras((MAKE | OWN_STEP)[name], scale=scale)
    grads = run.gradients(norm=norm)
    with run.unchanged():
        run.apply(run.scaled(grads))
    assert run.skipped == 1
    if scale == 1:
        run.keras.step(grads)
        assert np.isnan(run.keras.values()[0]).all()


@pytest.mark.parametrize("name", ["momentum", "momentum, each norm", *OWN_STEP])
@pytest.mark.parametrize("norm, scale", [(7e14, 2.0**15), (1e17, SCALE)])
def test_step_depends_on_norm_of_unscaled_gradients_alone(name, norm, scale):
    """The square of the scaled norm exceeds float32, and that of the norm does not."""
    run = BesideKeras((MAKE | OWN_STEP)[name], scale=scale)
    run.step(norm=norm)
    assert run.skipped == 0
    run.assert_alike(1e-6)


def test_policy_receives_largest_gradient_before_clipping():
    seen = []

    class Listening(LogMaxLossScale):
        def step(self, finite, amax=None):
            seen.append(float(amax))
            super().step(finite, amax)

    inner = K.SGD(0.1, global_clipnorm=LIMIT)
    run = Harness(keras_lso.LossScaleOptimizer(inner, loss_scale=Listening()))
    grads = run.gradients(norm=40.0)
    run.step(grads)
    largest = max(np.abs(g).max() for g in grads)
    np.testing.assert_allclose(seen, [largest], rtol=1e-6)
