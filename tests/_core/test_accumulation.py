"""`gradient_accumulation_steps` of the inner optimizer, in steps in one pass.

Keras's own optimizer, fed with the micro-batches that are finite, is the reference.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._backend import backend
from testing.beside_keras import SHAPES, Pair, bits, steps_by_rule

K = keras.optimizers
BACKEND = keras.backend.backend()
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
# On JAX it alone steps by its rule: XLA fuses the others' own steps with the check.
each = pytest.mark.parametrize("name", ["LARS"] if BACKEND == "jax" else MAKE)
# The steps are Keras's own there, which eager JAX compiles one by one.
pytestmark = [pytest.mark.full] if BACKEND == "jax" else []


def pair_of(name, count=3, **options):
    return Pair(MAKE[name], gradient_accumulation_steps=count, **options)


@each
@pytest.mark.parametrize("count", [2, 3])
def test_accumulated_steps_match_keras_after_each_micro_batch(name, count, way):
    pair = pair_of(name, count)
    for _ in range(2 * count + 1):
        pair.step()
        pair.assert_alike()
    assert steps_by_rule(pair.optimizer)


def test_window_of_four_is_bitwise_equal_to_keras_on_torch():
    pair = pair_of("SGD", 4)
    for _ in range(9):
        pair.step()
    if BACKEND == "torch":
        assert bits(pair.ours) == bits(pair.theirs)
    pair.assert_alike(2e-7)


@pytest.mark.exhaustive
@each
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_overflowing_micro_batch_is_dropped_whole_and_counted_as_skipped(
    name, bad, way
):
    """The first of a window, the one in the middle, and the one that would end it."""
    pair = pair_of(name)
    for number in range(9):
        if number in (0, 4, 8):
            pair.overflow(bad)
        pair.step()
        pair.assert_alike()
    assert int(pair.optimizer.skipped_steps) == 3


CLIPPED = {"momentum", "AdamW", "Lion"}


@pytest.mark.parametrize("name", ["momentum"] if BACKEND == "jax" else sorted(CLIPPED))
def test_global_clipnorm_clips_mean_of_window_not_micro_batches(name, way):
    pair = pair_of(name, global_clipnorm=0.5)
    # The mean of three is shorter than the limit in the first window alone.
    for size in (1e-3,) * 3 + (1.0,) * 6:
        pair.step(size)
        pair.assert_alike(8e-6)


def test_global_clipnorm_and_accumulation_steps_are_read_at_each_step():
    pair = pair_of("momentum", global_clipnorm=0.5)
    for limit, count in [(0.5, 3), (2.0, 3), (0.125, 3), (0.25, 2), (0.25, 2)]:
        for optimizer in (pair.optimizer.inner_optimizer, pair.inner):
            optimizer.global_clipnorm = limit
            optimizer.gradient_accumulation_steps = count
        pair.step()
        pair.assert_alike(8e-6)


@each
def test_float16_variables_accumulate_gradients_in_float32(name, way):
    pair = pair_of(name, dtype="float16")
    for _ in range(6):
        pair.step_in_float16()
    pair.assert_weights_alike_in_float16()


@pytest.mark.skipif(BACKEND == "jax", reason="Keras's own step adds them up there")
@pytest.mark.parametrize("limit", [None, 1.0])
def test_gradient_that_could_overflow_window_sum_is_skipped(limit, way):
    """A third of float32's largest number is finite, and so large that four are not."""
    pair = pair_of("momentum", 4, scale=1.0, global_clipnorm=limit)
    pair.step()
    before = bits(pair.state())
    for size in (np.finfo("float32").max / 3, np.finfo("float32").max / 4):
        pair.apply([np.full(s, size, "float32") for s in SHAPES])
        assert bits(pair.state()) == before
    assert int(pair.optimizer.skipped_steps) == 2
    for _ in range(3):
        pair.step()
    pair.assert_alike(8e-6)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras's own step adds them up there")
def test_gradient_that_could_overflow_norm_of_window_sum_is_skipped():
    """Squares of each gradient are finite, those of three added up would not be."""
    pair = pair_of("momentum", 3, global_clipnorm=1.0, scale=1.0)
    large = [np.zeros(s, "float32") for s in SHAPES]
    large[0][:] = 9e18
    before = bits(pair.state())
    for _ in range(3):
        pair.apply(large)
    assert bits(pair.state()) == before
    # What passes adds up to a finite norm.
    large[0][:] = 1e18
    for _ in range(3):
        pair.optimizer.apply(
            [ops.convert_to_tensor(g) for g in large], pair.ours, scaled=False
        )
    assert int(pair.optimizer.iterations) == 1
    assert all(np.isfinite(ops.convert_to_numpy(v)).all() for v in pair.ours)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_accumulation_with_missing_gradient_matches_keras():
    pair = pair_of("momentum")
    for missing in (None, 1, None, 0, None, 2, None):
        pair.step_without(missing)
        pair.assert_alike()


def test_accumulation_over_subset_of_variables_matches_keras():
    pair = pair_of("momentum")
    pair.inner.build(pair.theirs)
    for part in (3, 2, 3, 1, 3, 3):
        grads = [ops.convert_to_tensor(g) for g in pair.gradients()[:part]]
        pair.optimizer.apply(list(grads), pair.ours[:part], scaled=False)
        pair.inner.apply(list(grads), pair.theirs[:part])
        pair.assert_alike()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW"])
def test_apply_leaves_gradients_bitwise_unchanged(name, count, dtype, way):
    pair = pair_of(name, count)
    for _ in range(4):
        grads = [ops.cast(g, dtype) for g in pair.gradients()]
        before = bits(grads)
        pair.optimizer.apply(grads, pair.ours)
        assert bits(grads) == before


@pytest.mark.skipif(BACKEND != "torch", reason="Elsewhere a step is compiled")
def test_torch_clears_gradient_sums_only_at_finite_end_of_window(monkeypatch):
    pair = pair_of("momentum")
    pair.step()
    taken = []
    monkeypatch.setattr(backend, "clear", lambda *args: taken.append(args))
    pair.step()
    assert not taken
    # The last micro-batch of the window, if it were finite.
    pair.overflow(np.inf)
    assert not taken
    pair.step()
    assert taken


def test_stateless_accumulated_steps_are_bitwise_equal_to_apply():
    if BACKEND == "tensorflow":
        pytest.skip("Keras has no `stateless_apply` on TensorFlow")
    pair, twin = pair_of("AdamW"), pair_of("AdamW")
    pair.assert_stateless_steps_are_those_of(twin, count=7)


def test_multi_optimizer_may_accumulate_in_a_member_without_variables():
    """Such a member is not built, and has no sums to be checked."""
    if not hasattr(K, "MultiOptimizer"):
        pytest.skip("Keras has a MultiOptimizer since 3.15")
    kernels = K.SGD(1.0, gradient_accumulation_steps=2)
    inner = K.MultiOptimizer(K.OptimizerMap(K.SGD(0.5), {".*kernel": kernels}))
    w = keras.Variable(np.array([1.0, 2.0]), dtype="float16", name="bias")
    optimizer = keras_lso.LossScaleOptimizer(inner, master_weights=False)
    optimizer.apply([ops.array([0.5, 1.0], "float16")], [w], scaled=False)
    assert ops.convert_to_numpy(w).tolist() == [0.75, 1.5]
