"""What is checked is what is applied: in the dtype in which it is applied, added up."""

import functools
import re
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing import beside_keras
from testing.optimizers import OPTIMIZERS, rule_of

BACKEND = keras.backend.backend()
K = keras.optimizers
# Keras's own optimizer does not cast on PyTorch where it steps all variables at once.
CASTS = {
    "tensorflow": [K.SGD, K.Adam],
    "jax": [K.SGD, K.Adam],
    "torch": [K.Lamb, K.Ftrl],
}


def run(inner, dtype, grads, grad_dtype, scale=1.0, **options):
    """Applies gradients one after the other; returns the weights and the optimizer."""
    w = keras.Variable(np.zeros(2), dtype=dtype)
    options = {"master_weights": False, **options}
    optimizer = keras_lso.LossScaleOptimizer(
        inner, dynamic=False, initial_scale=scale, **options
    )
    optimizer.build([w])
    for grad in grads:
        value = ops.convert_to_tensor(np.asarray([grad, 1.0], grad_dtype))
        optimizer.apply([value], [w], scaled=True)
    return ops.convert_to_numpy(ops.cast(w, "float32")), optimizer


def bare(inner, dtype, grads, grad_dtype):
    w = keras.Variable(np.zeros(2), dtype=dtype)
    inner.build([w])
    for grad in grads:
        inner.apply([ops.convert_to_tensor(np.asarray([grad, 1.0], grad_dtype))], [w])
    return ops.convert_to_numpy(ops.cast(w, "float32"))


@pytest.mark.parametrize("make", CASTS[BACKEND])
def test_gradient_that_overflows_in_dtype_of_variable_is_skipped(make, way):
    weights, optimizer = run(make(1e-3), "float16", [1e5, 100.0], "float32")
    assert int(optimizer.skipped_steps) == 1
    np.testing.assert_array_equal(
        weights, bare(make(1e-3), "float16", [100], "float32")
    )


@pytest.mark.parametrize("make", CASTS[BACKEND])
def test_gradient_that_overflows_float16_when_unscaled_is_skipped(make, way):
    weights, optimizer = run(make(1e-3), "float16", [6e4], "float16", scale=0.5)
    assert int(optimizer.skipped_steps) == 1 and not weights.any()


@pytest.mark.skipif(BACKEND != "torch", reason="Keras casts gradients elsewhere")
@pytest.mark.parametrize("make", [K.SGD, K.Lion])
def test_gradient_that_torch_applies_in_float32_is_not_skipped(make):
    weights, optimizer = run(make(1e-3), "float16", [1e5], "float32")
    assert int(optimizer.skipped_steps) == 0
    np.testing.assert_array_equal(
        weights, bare(make(1e-3), "float16", [1e5], "float32")
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_wrapped_nadam_with_mixed_dtypes_is_bitwise_equal_to_keras(dtype):
    """Also where only those after it have gradients, one of them a scalar."""
    if BACKEND == "jax" and dtype == "float64":
        pytest.skip("JAX has no float64 unless it is enabled")
    ends = []
    for is_wrapped in (True, False):
        dtypes = [dtype, "float32", "float32"]
        shapes = [(2,), (2,), ()]
        variables = [
            keras.Variable(np.ones(shape), dtype=d)
            for shape, d in zip(shapes, dtypes, strict=True)
        ]
        inner = K.Nadam(0.125)
        optimizer, options = inner, {}
        if is_wrapped:
            optimizer = keras_lso.LossScaleOptimizer(inner, master_weights=False)
            options = {"scaled": False}
        optimizer.build(variables)
        for size in (1.0, 2.0, 3.0):
            grads = [ops.full(shape, size) for shape in shapes[1:]]
            optimizer.apply([None, *grads], variables, **options)
        ends.append(beside_keras.bits([*variables[1:], *inner.variables[1:]]))
        ends.append(float(ops.convert_to_numpy(ops.cast(inner._u_product, "float32"))))
    assert ends[:2] == ends[2:]


def test_lars_applies_gradient_beyond_float16_in_float32(way):
    # The gradient has this norm, and the weights are 0: the ratio is 1.
    weights, optimizer = run(keras_lso.LARS(1e-3), "float16", [1e5], "float32")
    assert int(optimizer.skipped_steps) == 0
    np.testing.assert_array_equal(weights, np.float16([-100.0, -1e-3]))


CLIPS = [{"clipnorm": 1.0}, {"clipvalue": 1.0}, {"global_clipnorm": 1.0}]


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_gradient_beyond_float16_is_applied_if_clipped_first(clip, way):
    make = CASTS[BACKEND][0]
    weights, optimizer = run(make(0.5, **clip), "float16", [1e5], "float32")
    assert int(optimizer.skipped_steps) == 0
    expected = bare(make(0.5, **clip), "float16", [1e5], "float32")
    np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_float16_gradient_is_clipped_in_float32(clip, way):
    """In float16 the square of 1,000 is inf, and its norm made every weight NaN."""
    ends = []
    for dtype in ("float16", "float32"):
        w = keras.Variable(np.zeros(2), dtype="float32")
        inner = K.Adadelta(0.5, **clip)
        optimizer = keras_lso.LossScaleOptimizer(inner)
        for _ in range(2):
            grad = ops.convert_to_tensor(np.asarray([1000.0, 1.0], dtype))
            optimizer.apply([grad], [w], scaled=False)
        assert int(optimizer.skipped_steps) == 0
        ends.append(ops.convert_to_numpy(w).tolist())
    assert ends[0] == ends[1] and np.isfinite(ends[0]).all()


@pytest.mark.parametrize("make", [K.SGD, K.Adam])
def test_micro_batch_that_overflows_float16_sum_is_dropped(make, way):
    inner = make(1e-3, gradient_accumulation_steps=2)
    weights, optimizer = run(inner, "float16", [4e4, 4e4, 100.0], "float32")
    assert int(optimizer.skipped_steps) == 1
    twin = make(1e-3, gradient_accumulation_steps=2)
    # Keras adds nothing to sums in float16 but what is in float16.
    expected = bare(twin, "float16", [4e4, 100.0], "float16")
    # On an accelerator PyTorch multiplies by the rate first, which rounds once more.
    np.testing.assert_allclose(weights, expected, rtol=2.0**-10)


@pytest.mark.parametrize("make", [K.SGD, K.Adadelta])
def test_micro_batches_that_could_overflow_float32_sum_are_skipped(make, way):
    inner = make(1e-3, gradient_accumulation_steps=2)
    weights, optimizer = run(inner, "float32", [3e38, 3e38], "float32")
    assert int(optimizer.skipped_steps) == 2 and not weights.any()


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 unless it is enabled")
def test_keras_step_skips_float64_gradient_beyond_float32(way):
    make = CASTS[BACKEND][0]
    weights, optimizer = run(make(1e-3), "float32", [1e39, 1.0], "float64")
    assert int(optimizer.skipped_steps) == 1
    np.testing.assert_array_equal(weights, bare(make(1e-3), "float32", [1], "float64"))


OURS = {
    "LARS": keras_lso.LARS,
    "LAMB": keras_lso.LAMB,
    "NovoGrad": keras_lso.NovoGrad,
    "LARC": lambda rate: keras_lso.LARC(K.SGD(rate)),
    # All variables in one step, on PyTorch.
    "SGD": K.SGD,
    "RMSprop": K.RMSprop,
}


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 unless it is enabled")
@pytest.mark.parametrize("grad", [1e39, 1e200])
@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_layerwise_and_fused_steps_skip_float64_gradient_beyond_float32(
    make, grad, way
):
    weights, optimizer = run(make(1e-3), "float32", [grad], "float64")
    assert int(optimizer.skipped_steps) == 1 and not weights.any()
    assert all(np.isfinite(v.numpy()).all() for v in optimizer.variables)


def test_master_weights_apply_gradient_beyond_float16(way):
    w = keras.Variable(np.zeros(1), dtype="float16")
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1e-3), initial_scale=1.0)
    optimizer.apply([ops.convert_to_tensor(np.float32([1e5]))], [w], scaled=True)
    assert int(optimizer.skipped_steps) == 0
    assert ops.convert_to_numpy(w).tolist() == [-100.0]


SQUARE = {
    "amsgrad": lambda rate: K.Adam(rate, amsgrad=True),
    "window": lambda rate: K.Adam(rate, gradient_accumulation_steps=2),
    "Adadelta": K.Adadelta,
    "Ftrl": K.Ftrl,
    "LARC": lambda rate: keras_lso.LARC(K.Adam(rate)),
    **{n: make for n, make in OPTIMIZERS.items() if rule_of(make).squares},
}
DO_NOT_SQUARE = {n: make for n, make in OPTIMIZERS.items() if n not in SQUARE}


@pytest.mark.exhaustive
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", SQUARE.values(), ids=SQUARE)
def test_gradient_whose_square_overflows_is_skipped(make, grad_dtype, way):
    """Keras's second moment would be infinite, and NaN a step later."""
    grads = [1.0, 1.0, 1e20, 1.0, 1e18, 1.0, 1.0]
    weights, optimizer = run(make(1e-3), "float32", grads, grad_dtype)
    assert int(optimizer.skipped_steps) == 1
    for values in (weights, *map(ops.convert_to_numpy, optimizer.variables)):
        assert np.isfinite(values).all()


@pytest.mark.parametrize("make", DO_NOT_SQUARE.values(), ids=DO_NOT_SQUARE)
def test_gradient_that_is_not_squared_may_be_larger(make, way):
    weights, optimizer = run(make(1e-30), "float32", [1e20, 1e25], "float32")
    assert int(optimizer.skipped_steps) == 0 and np.isfinite(weights).all()


def test_gradient_whose_square_overflows_is_recorded():
    a, b = (keras.Variable(np.zeros(1), name=name) for name in "ab")
    optimizer = keras_lso.GuardedOptimizer(K.Adam())
    optimizer.build([a, b])
    optimizer.record_overflows()
    optimizer.apply([ops.array([1e20]), ops.array([1e18])], [a, b])
    assert [v.name for v in optimizer.overflowed_variables()] == ["a"]


def test_gradient_that_overflows_when_cast_is_recorded():
    make = CASTS[BACKEND][0]
    a, b = (keras.Variable(np.zeros(1), dtype="float16", name=name) for name in "ab")
    optimizer = keras_lso.LossScaleOptimizer(
        make(1e-3), initial_scale=1.0, master_weights=False
    )
    optimizer.build([a, b])
    optimizer.record_overflows()
    grads = [ops.convert_to_tensor(np.float32([value])) for value in (1.0, 1e5)]
    optimizer.apply(grads, [a, b], scaled=True)
    assert [v.name for v in optimizer.overflowed_variables()] == ["b"]


TWICE = {
    "apply": lambda o, a: o.apply([ops.ones(1)] * 2, [a, a]),
    "build": lambda o, a: o.build([a, a]),
    "apply_gradients": lambda o, a: o.apply_gradients([(ops.ones(1), a)] * 2),
}


@pytest.mark.parametrize("use", TWICE.values(), ids=TWICE)
def test_duplicate_variable_is_rejected(use):
    a = keras.Variable(np.ones(1, "float32"), name="a")
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1.0))
    with pytest.raises(ValueError, match="twice: 'a' and 'a' are the same"):
        use(optimizer, a)
    assert float(a.numpy()[0]) == 1.0 and not optimizer.built


@pytest.mark.skipif(BACKEND == "jax", reason="JAX's arrays are values, not memory")
def test_two_variables_that_share_one_value_are_rejected():
    a = keras.Variable(np.ones(1, "float32"), name="a")
    b = keras.Variable(np.zeros(1, "float32"), name="b")
    b._value = a._value
    with pytest.raises(ValueError, match="'a' and 'b' are the same"):
        keras_lso.LossScaleOptimizer(K.SGD(1.0)).build([a, b])


def test_stateless_apply_updates_variables_that_share_one_value():
    if BACKEND == "tensorflow":
        pytest.skip("TensorFlow has no stateless_apply")
    variables = [keras.Variable(np.ones(1, "float32")) for _ in "ab"]
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1.0))
    optimizer.build(variables)
    state = [v.value for v in optimizer.variables]
    one = ops.ones(1)
    new, _ = optimizer.stateless_apply(state, [one, one], [one, one], scaled=False)
    assert [float(ops.convert_to_numpy(v)[0]) for v in new] == [0.0, 0.0]


def told(make, dtypes, **options):
    variables = [keras.Variable(np.ones(1), dtype=dtype) for dtype in dtypes]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        keras_lso.LossScaleOptimizer(make(), **options).build(variables)
    return [str(w.message) for w in seen]


def test_epsilon_that_is_zero_in_float16_warns():
    small = functools.partial(K.Adam, epsilon=1e-8)
    [message] = told(small, ["float16"], master_weights=False)
    for words in ("`epsilon=1e-08` is 0", "Adam", "float16", "`epsilon=1e-4`"):
        assert words in message
    [message] = told(K.Adafactor, ["float16"], master_weights=False)
    assert "`epsilon_1=1e-30`" in message and "`epsilon_1=1e-4`" in message
    # With masters it is what it is, and ours compute in float32.
    assert not told(small, ["float16"])
    assert not told(small, ["float32"], master_weights=False)
    assert not told(K.Adam, ["float16"], master_weights=False)
    ours = functools.partial(keras_lso.LAMB, epsilon=1e-8)
    assert not told(ours, ["float16"], master_weights=False)


@pytest.mark.parametrize("cls", [K.Adam, K.AdamW, K.Nadam, K.Adamax, K.Lamb])
def test_advised_epsilon_makes_steps_of_the_rate_in_float16(cls):
    """The square of such a gradient is 0 in float16, and so is a tenth of 1e-7."""
    small = functools.partial(cls, 2.0**-7, epsilon=1e-8)
    [message] = told(small, ["float16"], master_weights=False)
    [advised] = re.findall(r"Write `epsilon=(\S+)`", message)
    optimizer = keras_lso.GuardedOptimizer(
        cls(2.0**-7, epsilon=float(advised)), master_weights=False
    )
    weight = keras.Variable(np.ones(3), dtype="float16")
    grad = ops.convert_to_tensor(np.float16([0.0, 1e-4, 1e-2]))
    for _ in range(4):
        optimizer.apply([grad], [weight])
    moved = 1 - ops.convert_to_numpy(weight).astype("float32")
    assert (moved >= 0).all() and moved.max() <= 8 * 2.0**-7
