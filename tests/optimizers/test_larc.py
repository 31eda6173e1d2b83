"""`LARC`: the ratio against the original's formula, and the optimizers it wraps."""

import keras
import numpy as np
import pytest
from keras import ops
from keras.ops import convert_to_numpy as numpy

import keras_lso
from keras_lso import LARC, LossScaleOptimizer
from testing.keras_versions import multi_optimizer
from testing.refusals import sgd
from testing.trained_optimizers import saved

# A ratio is a few float32 operations, on norms that are sums of a few squares.
CLOSE = dict(rtol=2e-6)


def original(g, w, rate, eta, mode, min_update=1e-7, epsilon=1e-7):
    """The rescaled gradient, as in OpenSeq2Seq's `post_process_gradients`."""
    g, w = np.asarray(g, "float64"), np.asarray(w, "float64")
    w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
    if mode == "clip":
        ratio = max(eta * w_norm / (rate * (g_norm + epsilon)), min_update)
        return min(ratio, 1.0) * g
    return max(eta * w_norm / (g_norm + epsilon), min_update) * g


class Recorder(keras.optimizers.SGD):
    """Records the gradients of each step."""

    def apply(self, grads, trainable_variables=None):
        self.received = [None if g is None else np.array(numpy(g)) for g in grads]
        super().apply(grads, trainable_variables)


@pytest.fixture
def weights():
    random = np.random.default_rng(0)
    return [
        keras.Variable(random.standard_normal((4, 3)).astype("float32"), name="kernel"),
        keras.Variable(np.zeros(3, "float32"), name="bias"),
        keras.Variable(np.float32(2.0), name="scale"),
    ]


@pytest.fixture
def make_gradients(weights):
    def make(size=1.0, seed=1):
        random = np.random.default_rng(seed)
        return [
            np.asarray(size * random.standard_normal(v.shape), "float32")
            for v in weights
        ]

    return make


def twins_of(weights):
    return [keras.Variable(v.numpy(), name=v.name) for v in weights]


def assert_close(found, expected, **tolerance):
    for pair in zip(found, expected, strict=True):
        np.testing.assert_allclose(*map(numpy, pair), **(tolerance or CLOSE))


def tensors(grads):
    return [None if g is None else ops.array(g) for g in grads]


ARGUMENTS = {
    "by default": dict(eta=0.002),
    "all": dict(eta=0.3, min_update=0.05, epsilon=0.7),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("size", [1e-6, 0.1, 1e6])
@pytest.mark.parametrize("rate", [0.01, 5.0])
@pytest.mark.parametrize("mode", ["clip", "scale"])
def test_larc_ratio_matches_openseq2seq_formula(
    mode, rate, size, arguments, weights, make_gradients
):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [rate, rate / 8])
    inner = Recorder(schedule)
    optimizer = LARC(inner, mode=mode, exclude=["^bias$"], **arguments)
    for now in (rate, rate, rate / 8):
        grads = make_gradients(size)
        expected = [
            original(g, v.numpy(), now, mode=mode, **arguments)
            for g, v in zip(grads, weights, strict=True)
        ]
        expected[1] = grads[1]
        optimizer.apply(tensors(grads), weights)
        assert_close(inner.received, expected)


@pytest.mark.parametrize("mode", ["clip", "scale"])
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_zero_gradients_and_zero_rate_cause_no_division_by_zero(rate, mode, weights):
    before = [v.numpy().copy() for v in weights]
    inner = Recorder(rate)
    optimizer = LARC(inner, mode=mode, epsilon=0.0)
    optimizer.apply([ops.zeros(v.shape) for v in weights], weights)
    assert_close(weights, before, rtol=0)
    assert all((got == 0).all() for got in inner.received)


@pytest.mark.each_backend
def test_sparse_gradient_with_duplicate_rows_is_rescaled_like_dense_gradient(
    sparse_gradient,
):
    table, twin = (keras.Variable(np.ones((5, 2), "float32")) for _ in "ab")
    dense = np.zeros((5, 2), "float32")
    dense[1], dense[3] = 1.0, 5.0
    LARC(keras.optimizers.SGD(1.0)).apply([ops.array(dense)], [twin])
    # Row 3 twice: its parts add up.
    values = np.array([[1, 1], [2, 2], [3, 3]], "float32")
    rows = sparse_gradient(values, [1, 3, 3], (5, 2))
    LARC(keras.optimizers.SGD(1.0)).apply([rows], [table])
    np.testing.assert_allclose(table.numpy(), twin.numpy(), **CLOSE)
    assert (table.numpy()[0] == 1).all() and (table.numpy()[3] < 1).all()


def test_missing_gradient_stays_none(weights, make_gradients):
    grads = make_gradients()
    assert LARC(sgd(), exclude=[""]).ratios(grads, weights) == [None] * 3
    inner = Recorder(1.0)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        LARC(inner).apply(tensors([grads[0], None, grads[2]]), weights)
    assert inner.received[1] is None
    assert (weights[1].numpy() == 0).all()


def test_clip_mode_rejects_multi_optimizer():
    several = multi_optimizer(sgd(), {"x": sgd()})
    with pytest.raises(ValueError, match="MultiOptimizer has no single.*mode='scale'"):
        LARC(several)
    assert LARC(several, mode="scale").mode == "scale"


INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.5, clipnorm=0.1, use_ema=True),
    "LARS": lambda: keras_lso.LARS(0.5),
}


@pytest.mark.each_backend
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_larc_steps_inner_optimizer_on_rescaled_gradients(
    make, weights, make_gradients, compiled
):
    twins = twins_of(weights)
    optimizer, alone = LARC(make(), eta=0.01, mode="scale"), make()
    optimizer.build(weights)
    step = compiled(
        lambda *grads: optimizer.apply(list(grads), weights),
        weights + optimizer.variables,
    )
    for seed in range(4):
        grads = make_gradients(seed=seed)
        rescaled = [
            original(g, v.numpy(), 0.5, 0.01, "scale").astype("float32")
            for g, v in zip(grads, twins, strict=True)
        ]
        step(*tensors(grads))
        alone.apply(tensors(rescaled), twins)
    # Adam divides by roots of squares as small as a rescaled gradient's.
    assert_close(weights, twins, rtol=1e-4, atol=1e-6)
    assert int(optimizer.iterations) == 4


def test_larc_has_only_variables_of_inner_optimizer(weights):
    inner = keras.optimizers.Adam(0.5)
    optimizer = LARC(inner)
    optimizer.build(weights)
    assert [id(v) for v in optimizer.variables] == [id(v) for v in inner.variables]
    values = [np.full(v.shape, 3, v.dtype) for v in inner.variables]
    optimizer.set_weights(values)
    assert_close(inner.variables, values, rtol=0)


def test_larc_reads_and_writes_hyperparameters_of_inner_optimizer(weights):
    adam = keras.optimizers.Adam(epsilon=0.5)
    assert (LARC(adam).epsilon, adam.epsilon) == (1e-7, 0.5)
    inner = keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=2.0)
    optimizer = LARC(inner)
    assert float(optimizer.learning_rate) == 0.5
    assert (optimizer.momentum, optimizer.clipnorm) == (0.9, 2.0)
    optimizer.learning_rate = 0.25
    optimizer.clipnorm = None
    optimizer.eta = 0.5
    assert float(inner.learning_rate) == 0.25
    assert inner.clipnorm is None
    assert not hasattr(inner, "eta")


@pytest.mark.each_backend
def test_stateless_apply_accepts_scaled_argument_and_rejects_wrong_state(
    weights, make_gradients
):
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no stateless_apply on TensorFlow")
    optimizer = LARC(LossScaleOptimizer(keras.optimizers.SGD(0.5)))
    with pytest.raises(ValueError, match="LARC must be built"):
        optimizer.stateless_apply([], [], [])
    optimizer.build(weights)
    values = [ops.copy(v) for v in weights]
    new = {}
    for scaled in (True, False):
        factor = 2.0**15 if scaled else 1.0
        new[scaled], _ = optimizer.stateless_apply(
            [ops.copy(v) for v in optimizer.variables],
            [g * factor for g in tensors(make_gradients())],
            values,
            scaled=scaled,
        )
    assert_close(new[True], new[False], rtol=0)
    with pytest.raises(ValueError, match="`optimizer_variables` must be a list of"):
        optimizer.stateless_apply([], tensors(make_gradients()), values, scaled=True)


def larc_inside(**arguments):
    sgd = keras.optimizers.SGD(0.5, momentum=0.9)
    return LossScaleOptimizer(LARC(sgd, **arguments), initial_scale=2.0**12)


def larc_outside(**arguments):
    sgd = keras.optimizers.SGD(0.5, momentum=0.9)
    return LARC(LossScaleOptimizer(sgd, initial_scale=2.0**12), **arguments)


NESTED = {"inside": larc_inside, "outside": larc_outside}


@pytest.mark.each_backend
@pytest.mark.parametrize("mode", ["clip", "scale"])
@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_larc_ratios_use_unscaled_gradients(make, mode, weights, make_gradients):
    twins = twins_of(weights)
    optimizer = make(mode=mode)
    alone = LARC(keras.optimizers.SGD(0.5, momentum=0.9), mode=mode)
    for seed in range(3):
        grads = make_gradients(seed=seed)
        scale = np.float32(optimizer.scale_loss(1.0))
        assert scale == 2.0**12
        optimizer.apply(tensors([g * scale for g in grads]), weights)
        alone.apply(tensors(grads), twins)
    assert_close(weights, twins)
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.each_backend
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_overflow_skips_larc_step_and_halves_loss_scale(
    make, value, weights, make_gradients, snapshot
):
    optimizer = make()
    optimizer.apply(tensors(make_gradients()), weights, scaled=True)
    inner = optimizer
    while hasattr(inner, "inner_optimizer"):
        inner = inner.inner_optimizer
    before = snapshot(weights + inner.variables)
    grads = make_gradients()
    grads[1][0] = value
    optimizer.apply(tensors(grads), weights, scaled=True)
    assert snapshot(weights + inner.variables) == before
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 2.0**11


def test_loss_scale_factor_of_inner_optimizer_is_removed_from_norm(
    weights, make_gradients
):
    grads = make_gradients()
    expected = 256 * original(grads[0], weights[0].numpy(), 0.5, 0.002, "scale")
    inner = Recorder(0.5, loss_scale_factor=256.0)
    optimizer = LARC(inner, mode="scale")
    assert float(optimizer.scale_loss(ops.array(1.0))) == 256.0
    optimizer.apply(tensors([256 * g for g in grads]), weights)
    np.testing.assert_allclose(inner.received[0], expected, **CLOSE)


def test_second_loss_scale_around_larc_is_rejected(weights, make_gradients, snapshot):
    inner = LARC(LossScaleOptimizer(keras.optimizers.SGD(0.5)))
    with pytest.raises(TypeError, match="nor wrap one.*scaled twice"):
        LossScaleOptimizer(inner)
    # What `compile` does under mixed_float16.
    theirs = keras.optimizers.LossScaleOptimizer(inner)
    theirs.build(weights)
    before = snapshot(weights)
    with pytest.raises(
        ValueError, match=r"write LossScaleOptimizer\(LARC\(inner_optimizer\)\)"
    ):
        theirs.apply(tensors(make_gradients()), weights)
    assert snapshot(weights) == before


def test_keras_loss_scale_optimizer_inside_larc_is_rejected():
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    with pytest.raises(
        TypeError, match=r"keras_lso\.LossScaleOptimizer\(keras_lso\.LA"
    ):
        LARC(theirs)


def test_larc_saves_state_that_inner_optimizer_loads(weights, make_gradients):
    """A run may resume with LARC, or without it."""
    optimizer = LARC(keras.optimizers.Adam(0.5))
    for seed in range(3):
        optimizer.apply(tensors(make_gradients(seed=seed)), weights)
    alone = keras.optimizers.Adam(0.5)
    alone.build(weights)
    alone.load_own_variables(saved(optimizer))
    assert_close(optimizer.variables, alone.variables, rtol=0)
    assert int(alone.iterations) == 3
    assert "inner_optimizer" not in dir(optimizer)


def test_mismatched_gradients_and_variables_are_rejected(weights, make_gradients):
    optimizer = LARC(keras.optimizers.SGD(0.5))
    with pytest.raises(ValueError, match="2 gradients for 3 variables"):
        optimizer.apply(tensors(make_gradients()[:2]), weights)
    assert not optimizer.built
    with pytest.raises(ValueError, match="must be built"):
        optimizer.apply(tensors(make_gradients()))
