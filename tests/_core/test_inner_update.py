"""The finite check sees gradients in the dtype and sum in which they are applied."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import BACKEND, Harness, bits
from testing.optimizers import OPTIMIZERS, rule_of

K = keras.optimizers
# Keras's own optimizer does not cast on PyTorch where it steps all variables at once.
CASTS = {
    "tensorflow": [K.SGD, K.Adam],
    "jax": [K.SGD, K.Adam],
    "torch": [K.Lamb, K.Ftrl],
}[BACKEND]


def bare(optimizer, dtype, grads, grad_dtype):
    """Applies gradients one after the other; returns the harness."""
    run = Harness(optimizer, [keras.Variable(np.zeros(2), dtype=dtype)])
    for grad in grads:
        run.apply([ops.convert_to_tensor(np.asarray([grad, 1.0], grad_dtype))])
    return run


def wrapped(inner, dtype, grads, grad_dtype, scale=1.0, masters=False):
    optimizer = keras_lso.LossScaleOptimizer(
        inner, dynamic=False, initial_scale=scale, master_weights=masters
    )
    return bare(optimizer, dtype, grads, grad_dtype)


# The gradients of which the first is skipped, and the loss scale.
SKIPPED = {
    "in the dtype of the variable": ("float16", [1e5, 100.0], "float32", 1.0),
    "once it is unscaled": ("float16", [6e4, 100.0], "float16", 0.5),
    "in float32": ("float32", [1e39, 1.0], "float64", 1.0),
}


@pytest.mark.parametrize("case", SKIPPED)
@pytest.mark.parametrize("make", CASTS)
def test_gradient_that_overflows_as_applied_is_skipped(make, case, way):
    dtype, grads, grad_dtype, scale = SKIPPED[case]
    if BACKEND == "jax" and grad_dtype == "float64":
        pytest.skip("JAX has no float64 unless it is enabled")
    run = wrapped(make(1e-3), dtype, grads, grad_dtype, scale)
    assert run.skipped == 1
    if scale == 1:
        expected = bare(make(1e-3), dtype, grads[1:], grad_dtype)
        np.testing.assert_array_equal(run.values(), expected.values())


OURS = {
    "LARS": keras_lso.LARS,
    "LAMB": keras_lso.LAMB,
    "NovoGrad": keras_lso.NovoGrad,
    "LARC": lambda rate: keras_lso.LARC(K.SGD(rate)),
    # On PyTorch, these step all variables at once.
    "SGD": K.SGD,
    "RMSprop": K.RMSprop,
}


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 unless it is enabled")
@pytest.mark.parametrize("grad", [1e39, 1e200])
@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_layerwise_and_fused_steps_skip_float64_gradient_beyond_float32(
    make, grad, way
):
    run = wrapped(make(1e-3), "float32", [grad], "float64")
    assert run.skipped == 1 and not np.any(run.values())
    assert all(np.isfinite(v.numpy()).all() for v in run.optimizer.variables)


@pytest.mark.skipif(BACKEND != "torch", reason="Keras casts gradients elsewhere")
@pytest.mark.parametrize("make", [K.SGD, K.Lion])
def test_gradient_that_torch_applies_in_float32_is_not_skipped(make):
    run = wrapped(make(1e-3), "float16", [1e5], "float32")
    assert run.skipped == 0
    expected = bare(make(1e-3), "float16", [1e5], "float32")
    np.testing.assert_array_equal(run.values(), expected.values())


# The gradient has the norm 1e5, and the weights are 0, so the ratio of LARS is 1.
@pytest.mark.parametrize("make, masters", [(keras_lso.LARS, False), (K.SGD, True)])
def test_gradient_beyond_float16_is_applied_in_float32(make, masters, way):
    run = wrapped(make(1e-3), "float16", [1e5], "float32", masters=masters)
    assert run.skipped == 0
    np.testing.assert_array_equal(run.values(), [np.float16([-100.0, -1e-3])])


CLIPS = [{"clipnorm": 1.0}, {"clipvalue": 1.0}, {"global_clipnorm": 1.0}]


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_gradient_beyond_float16_is_applied_if_clipped_first(clip, way):
    make = CASTS[0]
    run = wrapped(make(0.5, **clip), "float16", [1e5], "float32")
    assert run.skipped == 0
    expected = bare(make(0.5, **clip), "float16", [1e5], "float32")
    np.testing.assert_array_equal(run.values(), expected.values())


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_float16_gradient_is_clipped_in_float32(clip, way):
    """In float16 the square of 1,000 is inf, and its norm made every weight NaN."""
    ends = []
    for dtype in ("float16", "float32"):
        optimizer = keras_lso.LossScaleOptimizer(K.Adadelta(0.5, **clip))
        run = Harness(optimizer, [(2,)])
        for _ in range(2):
            grad = ops.convert_to_tensor(np.asarray([1000.0, 1.0], dtype))
            run.apply([grad], scaled=False)
        assert run.skipped == 0
        ends += run.values()
    np.testing.assert_array_equal(*ends)
    assert np.isfinite(ends).all()


@pytest.mark.parametrize("make", [K.SGD, K.Adam])
def test_micro_batch_that_overflows_float16_sum_is_dropped(make, way):
    inner, twin = (make(1e-3, gradient_accumulation_steps=2) for _ in "ab")
    run = wrapped(inner, "float16", [4e4, 4e4, 100.0], "float32")
    assert run.skipped == 1
    # Keras's float16 sums take float16 gradients only.
    expected = bare(twin, "float16", [4e4, 100.0], "float16")
    # On an accelerator PyTorch multiplies by the rate first, which rounds once more.
    np.testing.assert_allclose(run.values(), expected.values(), rtol=2.0**-10)


@pytest.mark.parametrize("make", [K.SGD, K.Adadelta])
def test_micro_batches_that_could_overflow_float32_sum_are_skipped(make, way):
    inner = make(1e-3, gradient_accumulation_steps=2)
    run = wrapped(inner, "float32", [3e38, 3e38], "float32")
    assert run.skipped == 2 and not np.any(run.values())


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
    run = wrapped(make(1e-3), "float32", grads, grad_dtype)
    assert run.skipped == 1
    for values in map(ops.convert_to_numpy, [*run.weights, *run.optimizer.variables]):
        assert np.isfinite(values).all()


@pytest.mark.parametrize("make", DO_NOT_SQUARE.values(), ids=DO_NOT_SQUARE)
def test_gradient_that_is_not_squared_may_be_larger(make, way):
    run = wrapped(make(1e-30), "float32", [1e20, 1e25], "float32")
    assert run.skipped == 0 and np.isfinite(run.values()).all()


# The square overflows, or the gradient once it is cast.
@pytest.mark.parametrize(
    "make, dtype, large", [(K.Adam, "float32", 1e20), (CASTS[0], "float16", 1e5)]
)
def test_gradient_that_overflows_as_applied_is_recorded(make, dtype, large):
    optimizer = keras_lso.GuardedOptimizer(make(), master_weights=False)
    run = Harness(optimizer, [(1,), (1,)], dtype)
    optimizer.record_overflows()
    run.apply([ops.convert_to_tensor(np.float32([x])) for x in (large, 1.0)])
    assert optimizer.overflowed_variables() == run.weights[:1]


def in_window_of_three(rate):
    return K.SGD(rate, gradient_accumulation_steps=3)


# By what each step of a run is skipped: 4e4 overflows a sum in float16, 1e38 may
# overflow one of bfloat16 though this sum is small, and the square of 1e20 a norm.
@pytest.mark.parametrize(
    "make, dtype, gradients, are_skipped",
    [
        (in_window_of_three, "float16", [4e4, 4e4, 100.0], [False, True, False]),
        (in_window_of_three, "bfloat16", [5e37, 5e37, -5e37], [False] * 3),
        (in_window_of_three, "bfloat16", [-5e37, 1e38, 5e37], [False, True, False]),
        (lambda rate: K.SGD(rate, global_clipnorm=1.0), "float32", [1e20], [True]),
        (lambda rate: K.Adadelta(rate, global_clipnorm=1.0), "float32", [1e20], [True]),
    ],
)
def test_record_lists_gradient_if_and_only_if_it_skips_step(
    make, dtype, gradients, are_skipped, way
):
    optimizer = keras_lso.GuardedOptimizer(make(1e-30), master_weights=False)
    run = Harness(optimizer, [(2,), (2,)], dtype)
    optimizer.record_overflows()
    for size, is_skipped in zip(gradients, are_skipped, strict=True):
        is_applied = run.step([np.full(2, size), np.ones(2)], "float32")
        assert is_applied is not is_skipped
        expected = run.weights[:1] if is_skipped else []
        assert optimizer.overflowed_variables() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_wrapped_nadam_with_mixed_dtypes_is_bitwise_equal_to_keras(dtype):
    """Even if the variable of this dtype has no gradient, and another is a scalar."""
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
        ends.append(bits([*variables[1:], *inner.variables[1:]]))
        ends.append(float(ops.convert_to_numpy(ops.cast(inner._u_product, "float32"))))
    assert ends[:2] == ends[2:]
