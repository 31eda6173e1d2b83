"""Weights of 16 bits that train with remainders, or are rounded stochastically."""

import contextlib
import copy
import gc

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._backend import backend, codecs
from testing.harness import BACKEND, WAYS, Harness, array, bits, take
from testing.masters import OTHER_CODECS, shortened
from testing.optimizers import OPTIMIZERS
from testing.tensors import sparse_gradient
from testing.trained_optimizers import saved

K = keras.optimizers
SHAPES = [(3, 5), (17,), (), (70, 300)]
KINDS = ["float32", "remainder", "remainder8", "stochastic"]
# Optimizers whose steps are fused, in each form, and others that take their own steps.
MAKES = {
    **OPTIMIZERS,
    "decaying": lambda rate: K.AdamW(rate, weight_decay=0.1),
    "clipped": lambda rate: K.SGD(rate, momentum=0.9, clipnorm=1.0),
    "clipped by all": lambda rate: K.Adam(rate, global_clipnorm=1.0),
    "accumulated": lambda rate: K.Adam(rate, gradient_accumulation_steps=3),
    "averaged": lambda rate: K.SGD(rate, use_ema=True, ema_overwrite_frequency=4),
    "averaged windows": lambda rate: K.Adam(
        rate, use_ema=True, gradient_accumulation_steps=2
    ),
    "adadelta": K.Adadelta,
    "ftrl": K.Ftrl,
    "amsgrad": lambda rate: K.Adam(rate, amsgrad=True),
    "larc": lambda rate: keras_lso.LARC(K.SGD(rate, momentum=0.9)),
}
# One of them with slots in bfloat16.
NARROW = "accumulated", "bfloat16"
of_each_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
of_each_kind = pytest.mark.parametrize("kind", KINDS[1:])


def run_of(make, dtype, kind, slots=None):
    """Returns a harness whose every fifth step overflows."""
    optimizer = keras_lso.LossScaleOptimizer(
        make(0.01), master_weights=kind, slot_dtype=slots, initial_scale=4.0
    )
    return Harness(optimizer, SHAPES, dtype, overflow_every=5)


def masters_of(run):
    """Returns the float32 masters as a file has them."""
    return list(saved(run.optimizer).values())[-len(SHAPES) :]


def assert_same_masters(run, other, dtype):
    """Masters that are normal float16 numbers are equal to the bit."""
    for actual, expected in zip(masters_of(run), masters_of(other), strict=True):
        assert actual.dtype == expected.dtype == np.float32
        if dtype == "float16":
            is_small = np.abs(expected) < 2.0**-14
            # A share of 2**-40 is lost in each step, and comes back in the next slots.
            np.testing.assert_allclose(
                actual[is_small], expected[is_small], rtol=0, atol=1e-9
            )
            actual, expected = actual[~is_small], expected[~is_small]
        np.testing.assert_array_equal(actual, expected)


@of_each_dtype
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_remainders_train_like_float32_masters(make, dtype, monkeypatch):
    for way in WAYS:
        with monkeypatch.context() as patch:
            take(way, patch)
            run = run_of(make, dtype, "remainder").steps(7)
            other = run_of(make, dtype, "float32").steps(7)
            assert_same_masters(run, other, dtype)
    for a, b in zip(run.inner.variables, other.inner.variables, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
    assert run.skipped == other.skipped == 1


@of_each_dtype
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_short_remainders_train_like_float32_masters(make, dtype, way):
    run = run_of(make, dtype, "remainder8").steps(7)
    other = run_of(make, dtype, "float32").steps(7)
    for actual, expected in zip(masters_of(run), masters_of(other), strict=True):
        # Each step rounds a number below 4 to half of the remainder's last place.
        atol = 7 * (2.0**-15 if dtype == "bfloat16" else 2.0**-17)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
    assert run.skipped == other.skipped == 1


def train_short_remainders(inner, step, dtype):
    """Returns masters after 1,000 steps, and those of a step in NumPy, rounded."""
    random = np.random.default_rng(0)
    start = random.normal(size=500).astype("float32")
    weight = keras.Variable(start, dtype=dtype)
    options = {"master_weights": "remainder8", "dynamic": False, "initial_scale": 1.0}
    optimizer = keras_lso.LossScaleOptimizer(inner, **options)
    master = array(ops.cast(weight, "float32"))
    for _ in range(1000):
        grad = random.normal(size=500).astype("float32")
        optimizer.apply([ops.convert_to_tensor(grad)], [weight])
        master = shortened(step(master, grad), dtype)
    [found] = list(saved(optimizer).values())[-1:]
    return found, master


@of_each_dtype
def test_1000_steps_of_sgd_with_short_remainders_are_those_of_numpy(dtype):
    # A power of two: a compiler may round the product or not.
    rate = np.float32(2.0**-9)
    found, expected = train_short_remainders(
        K.SGD(float(rate)), lambda w, g: w - rate * g, dtype
    )
    np.testing.assert_array_equal(found, expected)


@of_each_dtype
def test_1000_steps_of_adam_with_short_remainders_are_those_of_numpy(dtype):
    m = v = count = 0.0

    def step(w, g):
        nonlocal m, v, count
        g, count = g.astype("float64"), count + 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        rate = 1e-3 * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        return (w - rate * m / (np.sqrt(v) + 1e-7)).astype("float32")

    found, expected = train_short_remainders(K.Adam(1e-3), step, dtype)
    # A last place of float32 decides one rounding in some hundred, by a last place of
    # the remainder. The weights are below 4, and most moved by 0.01 and more.
    unit = 2.0**-14 if dtype == "bfloat16" else 2.0**-16
    errors = np.abs(found - expected)
    assert errors.max() <= 10 * unit
    assert np.median(errors) <= 2 * unit


@of_each_dtype
@pytest.mark.parametrize("kind", ["float32", "remainder", "remainder8"])
def test_short_remainder_alone_loses_steps_below_its_last_place(kind, dtype):
    """In bfloat16 those below `2**-17` of the weight, in float16 below `2**-19`."""
    start = np.random.default_rng(0).uniform(1, 2, size=500)
    weight = keras.Variable(start.astype("float32"), dtype=dtype)
    before = array(ops.cast(weight, "float32"))
    least = 2.0**-17 if dtype == "bfloat16" else 2.0**-19
    for share, are_lost in ((0.9, kind == "remainder8"), (2.1, False)):
        optimizer = keras_lso.LossScaleOptimizer(
            K.SGD(1.0), master_weights=kind, dynamic=False, initial_scale=1.0
        )
        for _ in range(20):
            grad = np.float32(share * least * before)
            optimizer.apply([ops.convert_to_tensor(grad)], [weight])
        [master] = list(saved(optimizer).values())[-1:]
        if are_lost:
            np.testing.assert_array_equal(master, before)
        else:
            assert (master < before - 10 * least * before).all()


def remainders_of(run):
    dtypes = "int16", "int8"
    return [v for v in run.optimizer.variables if v.dtype in dtypes]


@of_each_dtype
@pytest.mark.parametrize(
    "kind, of_kind", [("remainder", "int16"), ("remainder8", "int8")]
)
def test_remainder_stores_no_float32_copy_per_weight(kind, of_kind, dtype):
    run = run_of(K.SGD, dtype, kind).steps(1)
    assert [tuple(v.shape) for v in remainders_of(run)] == SHAPES
    largest = [v for v in run.optimizer.variables if tuple(v.shape) == SHAPES[-1]]
    assert [v.dtype for v in largest] == [of_kind]


@of_each_dtype
def test_stochastic_rounding_adds_no_variables(dtype):
    kinds = "stochastic", False
    run, without = (run_of(K.SGD, dtype, kind).steps(1) for kind in kinds)
    assert len(run.optimizer.variables) == len(without.optimizer.variables)


def bytes_of(value):
    """Returns how many bytes a variable's value takes."""
    if value is None:
        return 0
    if BACKEND == "torch":
        return value.untyped_storage().nbytes()
    import tensorflow as tf

    held = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=tf.float32)
    return 4 * int(tf.size(held))


def assert_placeholders_hold_no_memory(run):
    for placeholder in run.inner._trainable_variables:
        assert placeholder.dtype == "float32"
        assert bytes_of(placeholder._value) <= 4


@of_each_kind
@of_each_dtype
@pytest.mark.exhaustive
def test_placeholders_hold_no_memory_between_steps(dtype, kind):
    run = run_of(K.Adam, dtype, kind).steps(2)
    gc.collect()
    assert_placeholders_hold_no_memory(run)


@of_each_kind
def test_placeholders_release_memory_after_error(kind, monkeypatch):
    run = run_of(K.Adadelta, "bfloat16", kind).steps(2)
    before = bits(run.weights)

    def fail(*args, **kwargs):
        raise ArithmeticError

    monkeypatch.setattr(run.inner, "apply", fail)
    with pytest.raises(ArithmeticError):
        run.steps(1)
    assert bits(run.weights) == before
    if backend.LENDS_MEMORY:
        assert_placeholders_hold_no_memory(run)


@pytest.mark.parametrize("kind", KINDS)
@of_each_dtype
@pytest.mark.parametrize("name", ["adamw", "lars", "adadelta"])
@pytest.mark.exhaustive
def test_skipped_step_leaves_weights_slots_and_masters_unchanged(
    name, dtype, kind, way
):
    run = run_of(MAKES[name], dtype, kind).steps(4)
    with run.unchanged():
        run.steps(1)
    assert run.skipped == 1


@of_each_dtype
@pytest.mark.parametrize("kind", ["remainder", "remainder8"])
def test_skipped_step_keeps_remainders_of_assigned_weights(kind, dtype, way):
    run = run_of(K.SGD, dtype, kind).steps(4)
    for weight in run.weights:
        weight.assign(ops.zeros(weight.shape, dtype=dtype))
    with run.unchanged():
        run.steps(1)
    assert run.skipped == 1


def special(dtype):
    """Weights that a user may assign, among them powers of two and a mask's -inf."""
    is_float16 = dtype == "float16"
    largest = 65504.0 if is_float16 else (2 - 2**-7) * 2.0**127
    # A compiler makes float32's subnormals 0.
    smallest = [2.0**-24, 2.0**-14] if is_float16 else [2.0**-125]
    some = [0.0, largest, *smallest, 1.0, 0.25, 0.3, 3.0, np.inf]
    return np.float32([*some, *(-value for value in some), np.nan])


@pytest.mark.parametrize("make", [K.SGD, K.Adadelta])
@pytest.mark.parametrize("kind", KINDS)
@of_each_dtype
def test_assigned_weight_survives_zero_step(way, dtype, kind, make, monkeypatch):
    run = run_of(make, dtype, kind).steps(4)
    values = [np.resize(special(dtype), s) for s in SHAPES]
    assigned = [ops.cast(ops.convert_to_tensor(v), dtype) for v in values]
    for weight, value in zip(run.weights, assigned, strict=True):
        weight.assign(value)
    for _ in range(2):
        run.optimizer.apply([ops.zeros(s) for s in SHAPES], run.weights)
    for actual, value in zip(run.values(), assigned, strict=True):
        expected = array(ops.cast(value, "float32"))
        if dtype == "float16":
            expected = np.clip(expected, -65504.0, 65504.0)
        np.testing.assert_array_equal(actual, expected)
        has_sign = ~np.isnan(actual)
        np.testing.assert_array_equal(
            np.signbit(actual)[has_sign], np.signbit(expected)[has_sign]
        )


def test_stochastic_rounding_preserves_small_updates_on_average():
    start = np.ones((64, 64), "float32")
    w = keras.Variable(start, dtype="bfloat16")
    optimizer = keras_lso.GuardedOptimizer(K.SGD(1.0), master_weights="stochastic")
    for _ in range(100):
        optimizer.apply([ops.full((64, 64), 1e-4)], [w])
    actual = array(ops.cast(w, "float32")).astype("float64")
    # Below 1 a unit is 2**-8, and a sum of 100 roundings is off by up to 5 of them; of
    # 4,096 weights the mean is off by a 64th of the deviation.
    error = np.sqrt(100 * 1e-4 * 2.0**-8) / 64
    assert abs(actual.mean() - 0.99) <= 4 * error
    assert actual.std() > 0


def test_weights_overwritten_by_averages_are_rounded_without_bias():
    """Such a step rounds twice. With the same bits, both go up together."""
    unit = 2.0**-7
    w = keras.Variable(np.ones(2**16, "float32"), dtype="bfloat16")
    inner = K.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1)
    optimizer = keras_lso.GuardedOptimizer(inner, master_weights="stochastic")
    for _ in range(2):
        optimizer.apply([ops.full((2**16,), -0.5 * unit)], [w])
    actual = array(ops.cast(w, "float32")).astype("float64")
    # The first average is 0.5 units above 1, the second one half of that and of 1. Each
    # of four roundings has a deviation of half a unit at most.
    error = np.sqrt(4 * 0.25) / 2**8
    assert abs((actual.mean() - 1) / unit - 0.75) <= 4 * error


def test_equal_weights_are_rounded_with_different_random_bits():
    pair = [keras.Variable(np.ones(1000, "float32"), dtype="bfloat16") for _ in "ab"]
    optimizer = keras_lso.GuardedOptimizer(K.SGD(1.0), master_weights="stochastic")
    optimizer.apply([ops.full((1000,), 1e-3)] * 2, pair)
    assert len(set(bits(pair))) == 2


def loaded(run, kind, make, dtype, steps=0, slots=None):
    """Returns a run of a kind that resumes another after some steps of its own."""
    store = saved(run.optimizer)
    new = run_of(make, dtype, kind, slots=slots).steps(steps)
    for weight, old in zip(new.weights, run.weights, strict=True):
        weight.assign(ops.convert_to_tensor(old))
    new.optimizer.load_own_variables(store)
    new.random, new.drawn = copy.deepcopy(run.random), run.drawn
    return new


@pytest.mark.parametrize(
    "name, slots, others",
    [
        *((name, None, None) for name in ("adam", "lars", "adadelta")),
        ("adam", None, "bfloat16"),
        ("lars", "bfloat16", None),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
@of_each_dtype
@pytest.mark.exhaustive
def test_file_of_each_kind_loads_into_every_kind(
    dtype, other, kind, name, slots, others
):
    make = MAKES[name]
    run = run_of(make, dtype, kind, slots=slots).steps(4)
    new = loaded(run, other, make, dtype, slots=others)
    for old, actual in zip(run.inner.variables, new.inner.variables, strict=True):
        expected = array(old).astype(actual.dtype)
        assert bits([actual]) == bits([expected])
    assert bits(new.weights) == bits(run.weights)
    if other != "stochastic":
        for actual, expected in zip(masters_of(new), masters_of(run), strict=True):
            # At a tie, the other kind rounds to the next number. A remainder of 8 bits
            # of float16 is in units of 2**-31 or more.
            tolerance = 2.0**-23, 2.0**-39
            if other == "remainder8":
                tolerance = 2.0**-15, 2.0**-31
            rtol, atol = tolerance
            np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)
    new.steps(3)


@of_each_kind
@of_each_dtype
@pytest.mark.parametrize(
    "name, slots",
    [*((name, None) for name in ("adamw", "accumulated", "adadelta")), NARROW],
)
@pytest.mark.exhaustive
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(name, slots, dtype, kind):
    run = run_of(MAKES[name], dtype, kind, slots=slots).steps(4)
    new = loaded(run, kind, MAKES[name], dtype, slots=slots)
    assert new.steps(3).bits() == run.steps(3).bits()


def tolerance_of(name, dtype):
    """Returns how much of a master a kind loses in one step."""
    if name.startswith("dithered"):
        return OTHER_CODECS[name].unit(dtype)
    half_unit = 2.0**-10 if dtype == "float16" else 2.0**-7
    digits = {"residual, bfloat16": 2.0**-9, "residual, float16": 2.0**-12}
    return half_unit * digits.get(name, 0.0)


@of_each_dtype
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["momentum", "adam", "lars", "adadelta", "averaged"])
@pytest.mark.parametrize("kind", OTHER_CODECS)
def test_kind_that_is_added_trains_like_float32_masters(
    kind, name, dtype, way, monkeypatch
):
    """Each attribute of a codec has another value in one of these than in ours."""
    monkeypatch.setitem(codecs.CODECS, kind, OTHER_CODECS[kind])
    make = MAKES[name]
    run = run_of(make, dtype, kind).steps(4)
    other = run_of(make, dtype, "float32").steps(7)
    new = loaded(run, kind, make, dtype, steps=2)
    for _ in range(3):
        is_skipped = run.drawn == 4
        with run.unchanged() if is_skipped else contextlib.nullcontext():
            run.steps(1)
    for actual in (run, new.steps(3)):
        for ours, expected in zip(masters_of(actual), masters_of(other), strict=True):
            atol = 7 * tolerance_of(kind, dtype)
            np.testing.assert_allclose(ours, expected, rtol=0, atol=atol)
    if kind == "noisy":
        assert bits(run.weights) != bits(other.weights)


@of_each_kind
def test_file_without_masters_restarts_from_weights(kind):
    make = MAKES["adam"]
    run = run_of(make, "bfloat16", False).steps(3)
    new = loaded(run, kind, make, "bfloat16", steps=2)
    for master, value in zip(masters_of(new), run.values(), strict=True):
        np.testing.assert_array_equal(master, value)


@of_each_kind
def test_deepcopy_keeps_kind_and_leaves_original_unchanged(kind):
    run = run_of(MAKES["adam"], "bfloat16", kind).steps(2)
    before = run.bits()
    twin = copy.deepcopy(run.optimizer)
    assert twin.master_weights == kind
    assert run.bits() == before


@of_each_kind
@of_each_dtype
@pytest.mark.parametrize(
    "name, slots",
    [*((name, None) for name in ("adam", "lars", "adadelta")), NARROW],
)
@pytest.mark.exhaustive
def test_stateless_step_is_bitwise_equal_to_step(name, slots, dtype, kind):
    run, twin = (run_of(MAKES[name], dtype, kind, slots=slots).steps(2) for _ in "ab")
    run.assert_stateless_steps_equal_those_of(twin, [run.gradients() for _ in "ab"])


@pytest.mark.parametrize("kind", KINDS)
@of_each_dtype
@pytest.mark.exhaustive
def test_finalize_variable_values_assigns_averages_to_weights(dtype, kind):
    run = run_of(lambda rate: K.SGD(rate, use_ema=True), dtype, kind).steps(3)
    averages = list(map(array, run.inner._model_variables_moving_average))
    run.optimizer.finalize_variable_values(run.weights)
    for actual, average in zip(run.values(), averages, strict=True):
        unit = 2.0**-10 if dtype == "float16" else 2.0**-7
        np.testing.assert_allclose(actual, average, rtol=unit, atol=2.0**-24)
    if kind == "float32":
        for master, average in zip(masters_of(run), averages, strict=True):
            np.testing.assert_array_equal(master, average)


@of_each_kind
def test_sparse_gradients_step_like_float32_masters(kind):
    values = ops.convert_to_tensor(np.ones((2, 4), "float32"))
    results = []
    for of_kind in (kind, "float32"):
        w = keras.Variable(np.ones((5, 4), "float32"), dtype="bfloat16")
        optimizer = keras_lso.GuardedOptimizer(K.Adam(0.1), master_weights=of_kind)
        run = Harness(optimizer, [w])
        for _ in range(2):
            run.apply([sparse_gradient(values, [1, 3], (5, 4))])
        results += run.values()
    # Two steps are rounded, each to one of two neighbours.
    np.testing.assert_allclose(*results, rtol=0, atol=2.0**-7)


@pytest.mark.skipif(
    backend.LENDS_MEMORY, reason="here what an optimizer steps on lasts for a step"
)
def test_remainder_kind_keeps_no_int16_state_without_fused_step():
    """TensorFlow's steps write variables, which hold their memory."""
    run = run_of(K.Adadelta, "bfloat16", "remainder").steps(2)
    assert not remainders_of(run)
    assert run.optimizer.get_config()["master_weights"] == "remainder"


def test_clipping_set_after_build_steps_remainders_like_float32_masters():
    """A limit that is set after `build` ends the fused steps."""
    runs = [run_of(K.Adam, "bfloat16", kind) for kind in ("remainder", "float32")]
    for run in runs:
        run.steps(3)
        run.inner.clipnorm = 0.5
        run.inner.clipvalue = 0.1
        run.steps(3)
    assert_same_masters(*runs, "bfloat16")
