"""Accumulation steps and moving averages in fused steps, beside Keras's own optimizer.

Keras's gets the same gradients, without those that are not finite.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._backend import backend
from testing.harness import BACKEND, SHAPES, BesideKeras, array, bits, steps_by_rule

K = keras.optimizers
MAKE = {
    "SGD": K.SGD,
    "momentum": lambda rate, **k: K.SGD(rate, momentum=0.9, **k),
    "AdamW": K.AdamW,
    "Nadam": K.Nadam,
    "Adamax": K.Adamax,
    "Lion": K.Lion,
    "RMSprop": K.RMSprop,
    "LARS": lambda rate, **k: keras_lso.LARS(rate, eeta=0.5, **k),
    "LAMB": keras_lso.LAMB,
    "NovoGrad": keras_lso.NovoGrad,
}
# On JAX only LARS steps by its rule: XLA fuses the others' own steps with the check.
of_each_rule = ["LARS"] if BACKEND == "jax" else MAKE
each = pytest.mark.parametrize("name", of_each_rule)
# The steps are Keras's own there, which eager JAX compiles one by one.
pytestmark = [pytest.mark.full] if BACKEND == "jax" else []


def accumulating(name, count=3, **options):
    return BesideKeras(MAKE[name], gradient_accumulation_steps=count, **options)


def averaging(name, **options):
    options = {"use_ema": True, "ema_momentum": 0.75, **options}
    return BesideKeras(MAKE[name], **options)


# --- Accumulation steps -------------------------------------------------------------


@each
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.exhaustive
def test_accumulated_steps_match_keras_despite_overflows(name, count, way):
    run = accumulating(name, count)
    # The first micro-batch, one in the middle, and one that would be the last.
    for number in range(3 * count):
        if number in (0, count + 1, 3 * count - 1):
            run.overflow([np.nan, np.inf][number % 2])
        run.step()
        run.assert_alike()
    assert run.skipped == 3
    assert steps_by_rule(run.optimizer)
    if BACKEND == "torch" and (name, count) == ("SGD", 4):
        assert bits(run.weights) == bits(run.keras.weights)


CLIPPED = ["momentum"] if BACKEND == "jax" else ["AdamW", "Lion", "momentum"]


@pytest.mark.parametrize("name", CLIPPED)
def test_global_clipnorm_clips_accumulated_mean_not_micro_batches(name, way):
    run = accumulating(name, global_clipnorm=0.5)
    # Only the first mean of three is shorter than the limit.
    for size in (1e-3,) * 3 + (1.0,) * 6:
        run.step(size=size)
        run.assert_alike(8e-6)


def test_global_clipnorm_and_accumulation_steps_are_read_at_each_step():
    run = accumulating("momentum", global_clipnorm=0.5)
    for limit, count in [(0.5, 3), (2.0, 3), (0.125, 3), (0.25, 2), (0.25, 2)]:
        run.set(global_clipnorm=limit, gradient_accumulation_steps=count)
        run.step()
        run.assert_alike(8e-6)


@each
def test_float16_variables_accumulate_gradients_in_float32(name, way):
    run = accumulating(name, dtype="float16")
    for _ in range(6):
        run.step()
    run.assert_weights_alike_in_float16()


@pytest.mark.skipif(BACKEND == "jax", reason="Keras's own step adds them up there")
@pytest.mark.parametrize("limit", [None, 1.0])
def test_gradient_that_could_overflow_accumulated_sum_is_skipped(limit, way):
    """A third of float32's largest number is finite, and the sum of four is not."""
    run = accumulating("momentum", 4, scale=1.0, global_clipnorm=limit)
    run.step()
    with run.unchanged():
        for size in (np.finfo("float32").max / 3, np.finfo("float32").max / 4):
            run.apply([ops.full(s, size) for s in SHAPES])
    assert run.skipped == 2
    for _ in range(3):
        run.step()
    run.assert_alike(8e-6)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras's own step adds them up there")
def test_gradient_that_could_overflow_norm_of_accumulated_sum_is_skipped():
    """The squares of each gradient are finite, and the sum of three has one of inf."""
    run = accumulating("momentum", 3, global_clipnorm=1.0, scale=1.0)

    def apply(size, **arguments):
        grads = [ops.full(s, size * (s == SHAPES[0])) for s in SHAPES]
        run.apply(grads, **arguments)

    with run.unchanged():
        for _ in range(3):
            apply(9e18)
    # The sum of smaller gradients, which are applied, has a finite norm.
    for _ in range(3):
        apply(1e18, scaled=False)
    assert int(run.optimizer.iterations) == 1
    assert all(np.isfinite(value).all() for value in run.values())


def test_accumulation_over_subset_of_variables_matches_keras():
    run = accumulating("momentum")
    for part in (3, 2, 3, 1, 3, 3):
        run.step(run.gradients()[:part])
        run.assert_alike()


@pytest.mark.skipif(BACKEND != "torch", reason="Elsewhere a step is compiled")
def test_torch_clears_gradient_sums_only_at_finite_end_of_accumulation(monkeypatch):
    run = accumulating("momentum")
    run.step()
    cleared = []
    monkeypatch.setattr(backend, "clear", lambda *args: cleared.append(args))
    run.step()
    # This would be the last micro-batch, if it were finite.
    run.overflow()
    assert not cleared
    run.step()
    assert cleared


def test_multi_optimizer_may_accumulate_in_a_member_without_variables():
    """Such a member is not built, and has no sums to check."""
    if not hasattr(K, "MultiOptimizer"):
        pytest.skip("Keras has a MultiOptimizer since 3.15")
    kernels = K.SGD(1.0, gradient_accumulation_steps=2)
    inner = K.MultiOptimizer(K.OptimizerMap(K.SGD(0.5), {".*kernel": kernels}))
    w = keras.Variable(np.array([1.0, 2.0]), dtype="float16", name="bias")
    optimizer = keras_lso.LossScaleOptimizer(inner, master_weights=False)
    optimizer.apply([ops.array([0.5, 1.0], "float16")], [w], scaled=False)
    assert array(w).tolist() == [0.75, 1.5]


# --- Moving averages ----------------------------------------------------------------

AVERAGED = ["SGD", "AdamW", "LARS", "LAMB"]
each_averaged = pytest.mark.parametrize(
    "name", [name for name in AVERAGED if name in of_each_rule]
)


@each_averaged
@pytest.mark.parametrize(
    "count, frequency", [(None, None), (None, 1), (None, 3), (3, None), (3, 2)]
)
def test_weights_and_averages_match_keras_despite_overflows(
    name, count, frequency, way
):
    run = averaging(
        name, gradient_accumulation_steps=count, ema_overwrite_frequency=frequency
    )
    for number in range(13):
        if number in (0, 1, 2, 5):
            # Before the first step, before the averages overwrite, and after it.
            run.overflow([np.nan, np.inf][number % 2])
        run.step()
        run.assert_alike()
    assert steps_by_rule(run.optimizer)


def test_ema_momentum_and_overwrite_frequency_are_read_at_each_step():
    run = averaging("SGD")
    for momentum, frequency in [(0.5, None), (0.9, 2), (0.1, 2), (0.5, 3), (0.5, 1)]:
        run.set(ema_momentum=momentum, ema_overwrite_frequency=frequency)
        run.step()
        run.assert_alike()


def test_averages_of_float16_variables_match_keras_in_float32(way):
    run = averaging("AdamW", dtype="float16", ema_overwrite_frequency=2)
    for _ in range(5):
        run.step()
        run.assert_weights_alike_in_float16()
    averages = run.inner._model_variables_moving_average
    expected = run.keras.optimizer._model_variables_moving_average
    for ours, theirs in zip(averages, expected, strict=True):
        assert ours.dtype == "float32"
        np.testing.assert_allclose(array(ours), array(theirs), rtol=2e-5, atol=2e-6)


def test_finalize_variable_values_assigns_averages_as_in_keras():
    run = averaging("SGD")
    for _ in range(3):
        run.step()
    for harness in (run, run.keras):
        harness.optimizer.finalize_variable_values(harness.weights)
    run.assert_alike()


@each_averaged
@pytest.mark.parametrize("frequency", [None, 2])
def test_assignment_between_micro_batches_reaches_averages(name, frequency, way):
    """As in Keras, which averages the weights after each micro-batch."""
    ends = []
    for dtype in ("float32", "float16"):
        w = keras.Variable(np.ones(2, dtype), dtype=dtype)
        inner = MAKE[name](
            0.5,
            use_ema=True,
            ema_momentum=0.5,
            ema_overwrite_frequency=frequency,
            gradient_accumulation_steps=4,
        )
        optimizer, arguments = inner, {}
        if dtype == "float16":
            optimizer, arguments = keras_lso.LossScaleOptimizer(inner), {"scaled": True}
        optimizer.build([w])
        for number in range(7):
            if number in (4, 6):
                # As `set_weights` does, at the start of an accumulation and within it.
                w.assign(np.full(2, number, dtype))
            optimizer.apply([ops.zeros(2, dtype)], [w], **arguments)
        [average] = inner._model_variables_moving_average
        ends.append([np.float16(array(v)).tolist() for v in (average, w)])
    assert ends[0] == ends[1]


# --- Both ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("make", [accumulating, averaging])
def test_step_with_missing_gradient_matches_keras(make):
    run = make("momentum")
    for missing in (None, 1, None, 0, None, 2, None):
        grads = run.gradients()
        if missing is not None:
            grads[missing] = None
        run.step(grads)
        run.assert_alike()


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("averages", [{}, {"use_ema": True, "ema_momentum": 0.75}])
def test_stateless_steps_are_bitwise_equal_to_apply(count, averages, way):
    options = {"gradient_accumulation_steps": count, **averages}
    if averages:
        options["ema_overwrite_frequency"] = 2
    run, twin = (BesideKeras(K.AdamW, **options) for _ in "ab")
    steps = [run.gradients() for _ in range(7)]
    run.assert_stateless_steps_equal_those_of(twin, steps)
