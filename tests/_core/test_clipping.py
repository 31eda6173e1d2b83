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
from testing import beside_keras
from testing.beside_keras import steps_by_rule

K = keras.optimizers
LIMIT, SCALE = 0.5, 1024.0
MAKE = {
    "SGD": lambda: K.SGD(0.1, global_clipnorm=LIMIT),
    "momentum": lambda: K.SGD(0.1, momentum=0.9, global_clipnorm=LIMIT),
    "Adam": lambda: K.Adam(0.1, global_clipnorm=LIMIT),
    "AdamW": lambda: K.AdamW(0.1, global_clipnorm=LIMIT),
    "Lion": lambda: K.Lion(0.1, global_clipnorm=LIMIT),
    "momentum, each norm": lambda: K.SGD(0.1, momentum=0.9, clipnorm=LIMIT),
    "AdamW, each norm": lambda: K.AdamW(0.1, clipnorm=LIMIT),
    "momentum, each value": lambda: K.SGD(0.1, momentum=0.9, clipvalue=0.05),
    "AdamW, each value": lambda: K.AdamW(0.1, clipvalue=0.05),
    "Lamb": lambda: K.Lamb(0.1, global_clipnorm=LIMIT),
    "LAMB": lambda: keras_lso.LAMB(0.1, global_clipnorm=LIMIT),
    "LARS, each norm": lambda: keras_lso.LARS(10.0, clipnorm=LIMIT),
    "NovoGrad, each value": lambda: keras_lso.NovoGrad(0.1, clipvalue=0.05),
}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
# More elements than are added up one by one, in tensors small and large.
SHAPES = [(3,), (2, 2), (200, 100)]


@pytest.fixture(params=beside_keras.WAYS)
def way(request, monkeypatch):
    beside_keras.take(request.param, monkeypatch)


def pair(make, dtype="float32", **arguments):
    random = np.random.default_rng(0)
    start = [random.normal(size=s).astype(dtype) for s in SHAPES]
    ours, theirs = ([keras.Variable(w, dtype=dtype) for w in start] for _ in "ab")
    optimizer = keras_lso.LossScaleOptimizer(make(), initial_scale=SCALE, **arguments)
    return optimizer, ours, make(), theirs


def gradients(norm, seed=1):
    random = np.random.default_rng(seed)
    grads = [random.normal(size=s) for s in SHAPES]
    length = np.sqrt(sum(np.square(g).sum() for g in grads))
    return [(g * norm / length).astype("float32") for g in grads]


def tensors(grads, factor=1.0, dtype="float32"):
    return [ops.convert_to_tensor((g * factor).astype(dtype)) for g in grads]


def assert_close(ours, theirs, rtol=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        a, b = map(ops.convert_to_numpy, (a, b))
        # Of the largest weight: Adam's steps are as long as its weights are large.
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


@each
def test_clipped_steps_match_keras(make, way):
    optimizer, ours, inner, theirs = pair(make)
    for norm in (0.01, 0.499, 0.501, 40.0, 0.0):
        grads = gradients(norm)
        optimizer.apply(tensors(grads, SCALE), ours)
        inner.apply(tensors(grads), theirs)
        assert_close(ours, theirs, 4e-6)
    assert int(optimizer.skipped_steps) == 0
    has_norms = registered_rule(inner).has_norms
    assert steps_by_rule(optimizer) is (has_norms or keras.backend.backend() != "jax")


@pytest.mark.parametrize("name", ["global_clipnorm", "clipnorm", "clipvalue"])
def test_clipping_limit_is_read_at_each_step(name):
    optimizer, ours, inner, theirs = pair(lambda: K.SGD(0.1, momentum=0.9))
    for limit in (0.5, 2.0, 0.125, None, 0.01):
        for clipping in (optimizer.inner_optimizer, inner):
            setattr(clipping, name, limit)
        optimizer.apply(tensors(gradients(4.0), SCALE), ours)
        inner.apply(tensors(gradients(4.0)), theirs)
        assert_close(ours, theirs)


@each
def test_clipped_steps_on_float16_gradients_match_keras_in_float32(make, way):
    """Against NumPy's norm of what float16 has left of the gradients."""
    optimizer, ours, inner, _ = pair(make, "float16")
    masters = [keras.Variable(ops.cast(v, "float32"), dtype="float32") for v in ours]
    for norm in (0.01, 40.0):
        narrow = [(g * 256).astype("float16") for g in gradients(norm)]
        optimizer.loss_scale_policy.assign_scale(256.0)
        optimizer.apply([ops.convert_to_tensor(g) for g in narrow], ours)
        unscaled = [g.astype("float32") / 256 for g in narrow]
        inner.apply(tensors(unscaled), masters)
    for variable, master in zip(ours, masters, strict=True):
        a, b = (ops.convert_to_numpy(v).astype("float32") for v in (variable, master))
        # Half a unit in the last place of a float16.
        np.testing.assert_allclose(a, b, rtol=2.0**-10, atol=1e-6)


@each
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_overflow_in_clipped_step_leaves_weights_and_slots_unchanged(make, bad, way):
    optimizer, ours, *_ = pair(make)
    optimizer.apply(tensors(gradients(4.0), SCALE), ours)
    kept = [*ours, *optimizer.inner_optimizer.variables]
    before = [np.array(ops.convert_to_numpy(v)).tobytes() for v in kept]
    grads = gradients(4.0)
    grads[2][7, 5] = bad
    optimizer.apply(tensors(grads, SCALE), ours)
    assert [np.array(ops.convert_to_numpy(v)).tobytes() for v in kept] == before
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == SCALE / 2


IN_THEIR_OWN_STEP = {
    "Adadelta": lambda: K.Adadelta(0.1, global_clipnorm=LIMIT),
    "LARS": lambda: keras_lso.LARS(0.1, global_clipnorm=LIMIT),
}


@pytest.mark.parametrize("name", ["momentum", "Adam", *IN_THEIR_OWN_STEP])
def test_overflow_of_global_norm_skips_step(name):
    """Keras would make NaN of it: gradients of 1e25 are finite, their squares not."""
    optimizer, ours, inner, theirs = pair((MAKE | IN_THEIR_OWN_STEP)[name])
    before = [np.array(ops.convert_to_numpy(v)).tobytes() for v in ours]
    grads = gradients(1e25)
    optimizer.apply(tensors(grads), ours, scaled=False)
    assert [np.array(ops.convert_to_numpy(v)).tobytes() for v in ours] == before
    assert int(optimizer.skipped_steps) == 1
    inner.apply(tensors(grads), theirs)
    assert np.isnan(ops.convert_to_numpy(theirs[0])).all()


@pytest.mark.parametrize("name", ["Adam", *IN_THEIR_OWN_STEP])
def test_overflow_of_unscaled_global_norm_skips_step(name):
    """Squares of gradients of 1e18 are finite; those of 1024 times as large are not."""
    make = (MAKE | IN_THEIR_OWN_STEP)[name]
    optimizer = keras_lso.LossScaleOptimizer(
        make(), initial_scale=2.0**-10, min_scale=2.0**-12
    )
    ours = [keras.Variable(np.ones(s, "float32")) for s in SHAPES]
    optimizer.apply(tensors(gradients(1e18)), ours)
    assert int(optimizer.skipped_steps) == 1
    for variable in ours:
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), 1.0)


@pytest.mark.parametrize("name", ["momentum", *IN_THEIR_OWN_STEP])
def test_step_depends_on_norm_of_unscaled_gradients_alone(name):
    """The square of the scaled norm exceeds float32, and that of the norm does not."""
    optimizer, ours, inner, theirs = pair((MAKE | IN_THEIR_OWN_STEP)[name])
    optimizer.loss_scale_policy.assign_scale(2.0**15)
    optimizer.apply(tensors(gradients(7e14), 2.0**15), ours)
    assert int(optimizer.skipped_steps) == 0
    inner.apply(tensors(gradients(7e14)), theirs)
    assert_close(ours, theirs)


def test_clipping_limits_set_after_init_follow_keras_precedence(way):
    optimizer, ours, inner, theirs = pair(lambda: K.SGD(0.1))
    for clipping in (optimizer.inner_optimizer, inner):
        clipping.clipvalue, clipping.global_clipnorm = 1e-4, 0.2
    for norm in (0.1, 4.0):
        optimizer.apply(tensors(gradients(norm), SCALE), ours)
        inner.apply(tensors(gradients(norm)), theirs)
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue"])
def test_clipnorm_and_clipvalue_clip_mean_of_window_as_in_keras(name, way):
    optimizer, ours, inner, theirs = pair(
        lambda: K.SGD(0.1, gradient_accumulation_steps=2, **{name: 0.05})
    )
    for seed in range(4):
        grads = gradients(30.0, seed)
        optimizer.apply(tensors(grads, SCALE), ours)
        inner.apply(tensors(grads), theirs)
        assert_close(ours, theirs)


def test_clipnorm_of_large_gradients_matches_keras_despite_scale():
    """The square of a gradient of 1e17 is finite, but not once it is scaled."""
    optimizer, ours, inner, theirs = pair(MAKE["momentum, each norm"])
    grads = gradients(1e17)
    optimizer.apply(tensors(grads, SCALE), ours)
    inner.apply(tensors(grads), theirs)
    assert_close(ours, theirs)


def test_policy_receives_largest_gradient_before_clipping():
    seen = []

    class Listening(LogMaxLossScale):
        def step(self, finite, amax=None):
            seen.append(float(amax))
            super().step(finite, amax)

    optimizer = keras_lso.LossScaleOptimizer(MAKE["momentum"](), loss_scale=Listening())
    ours = [keras.Variable(np.ones(s, "float32")) for s in SHAPES]
    grads = gradients(40.0)
    optimizer.apply(tensors(grads), ours)
    # Of the gradients as they come, before they are clipped.
    np.testing.assert_allclose(seen, [max(np.abs(g).max() for g in grads)], rtol=1e-6)
