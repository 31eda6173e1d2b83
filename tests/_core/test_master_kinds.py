"""Weights of 16 bits that train with remainders, or are rounded stochastically."""

import copy

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._backend import backend, codecs
from testing.beside_keras import WAYS, bits, take
from testing.masters import OTHER_CODECS
from testing.optimizers import OPTIMIZERS
from testing.trained_optimizers import saved

K = keras.optimizers
SHAPES = [(3, 5), (17,), (), (70, 300)]
KINDS = ["float32", "remainder", "stochastic"]
# Those whose step is one pass, in some form of it, and those that step by themselves.
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
# One of them, with slots in bfloat16.
NARROW = "accumulated", "bfloat16"
of_each_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
of_each_kind = pytest.mark.parametrize("kind", KINDS[1:])


class Run:
    """Steps on weights of 16 bits, of which every run has the same gradients."""

    def __init__(self, make, dtype, kind, cls=keras_lso.LossScaleOptimizer, slots=None):
        random = np.random.default_rng(0)
        self.dtype, self.random = dtype, np.random.default_rng(1)
        self.weights = [
            keras.Variable((random.normal(size=s) * 0.5).astype("float32"), dtype=dtype)
            for s in SHAPES
        ]
        scale = {"initial_scale": 4.0} if cls is keras_lso.LossScaleOptimizer else {}
        self.optimizer = cls(make(0.01), master_weights=kind, slot_dtype=slots, **scale)
        self.optimizer.build(self.weights)
        self.taken = 0

    def gradients(self):
        grads = [
            ops.cast(
                ops.convert_to_tensor(self.random.normal(size=s).astype("float32")),
                self.dtype,
            )
            for s in SHAPES
        ]
        self.taken += 1
        if self.taken % 5 == 0:
            grads[1] = grads[1] * np.inf
        return grads

    def steps(self, count):
        for _ in range(count):
            self.optimizer.apply(self.gradients(), self.weights, scaled=True)
        return self

    def numbers(self):
        """The float32 numbers that a file has."""
        return list(saved(self.optimizer).values())[-len(SHAPES) :]

    def state(self):
        return bits(self.weights), bits(self.optimizer.variables)


def assert_same_numbers(run, other, dtype):
    """Those that float16 holds as normal numbers are the same to the bit."""
    for found, right in zip(run.numbers(), other.numbers(), strict=True):
        assert found.dtype == right.dtype == np.float32
        if dtype == "float16":
            is_small = np.abs(right) < 2.0**-14
            # A part of 2**-40 is lost in each step, and comes back in the next slots.
            np.testing.assert_allclose(
                found[is_small], right[is_small], rtol=0, atol=1e-9
            )
            found, right = found[~is_small], right[~is_small]
        np.testing.assert_array_equal(found, right)


@of_each_dtype
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_remainders_train_like_float32_masters(make, dtype, monkeypatch):
    for way in WAYS:
        with monkeypatch.context() as patch:
            take(way, patch)
            run = Run(make, dtype, "remainder").steps(7)
            other = Run(make, dtype, "float32").steps(7)
            assert_same_numbers(run, other, dtype)
    for a, b in zip(
        run.optimizer.inner_optimizer.variables,
        other.optimizer.inner_optimizer.variables,
        strict=True,
    ):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
    assert int(run.optimizer.skipped_steps) == int(other.optimizer.skipped_steps) == 1


def kept_of(optimizer):
    return [v for v in optimizer.variables if v.dtype == "int16"]


@of_each_dtype
def test_remainder_stores_int16_and_no_float32_copy_per_weight(dtype):
    run = Run(K.SGD, dtype, "remainder").steps(1)
    assert [tuple(v.shape) for v in kept_of(run.optimizer)] == SHAPES
    largest = [v for v in run.optimizer.variables if tuple(v.shape) == SHAPES[-1]]
    assert [v.dtype for v in largest] == ["int16"]


@of_each_dtype
def test_stochastic_rounding_adds_no_variables(dtype):
    kinds = "stochastic", False
    run, without = (Run(K.SGD, dtype, kind).steps(1) for kind in kinds)
    assert len(run.optimizer.variables) == len(without.optimizer.variables)


@of_each_kind
@of_each_dtype
@pytest.mark.exhaustive
def test_placeholders_hold_no_memory_between_steps(dtype, kind):
    import gc

    run = Run(K.Adam, dtype, kind).steps(2)
    gc.collect()
    for placeholder in run.optimizer.inner_optimizer._trainable_variables:
        assert placeholder.dtype == "float32"
        assert bytes_of(placeholder._value) <= 4


def bytes_of(value):
    """What a variable's value takes in memory."""
    if value is None:
        return 0
    if keras.backend.backend() == "torch":
        return value.untyped_storage().nbytes()
    import tensorflow as tf

    held = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=tf.float32)
    return 4 * int(tf.size(held))


@of_each_kind
def test_placeholders_release_memory_after_error(kind, monkeypatch):
    run = Run(K.Adadelta, "bfloat16", kind).steps(2)
    before = bits(run.weights)

    def fail(*args, **kwargs):
        raise ArithmeticError

    monkeypatch.setattr(run.optimizer.inner_optimizer, "apply", fail)
    with pytest.raises(ArithmeticError):
        run.steps(1)
    assert bits(run.weights) == before
    if backend.LENDS_MEMORY:
        for placeholder in run.optimizer.inner_optimizer._trainable_variables:
            assert bytes_of(placeholder._value) <= 4


@pytest.mark.parametrize("kind", KINDS)
@of_each_dtype
@pytest.mark.parametrize("name", ["adamw", "lars", "adadelta"])
@pytest.mark.exhaustive
def test_skipped_step_leaves_weights_slots_and_masters_unchanged(
    name, dtype, kind, way
):
    run = Run(MAKES[name], dtype, kind).steps(4)
    kept = [*run.weights, *run.optimizer.inner_optimizer.variables]
    kept += run.optimizer._masters.variables
    before = bits(kept)
    run.steps(1)
    assert int(run.optimizer.skipped_steps) == 1
    assert bits(kept) == before


@of_each_dtype
def test_skipped_step_keeps_remainders_of_assigned_weights(dtype, way):
    run = Run(K.SGD, dtype, "remainder").steps(4)
    for weight in run.weights:
        weight.assign(ops.zeros(weight.shape, dtype=dtype))
    kept = [*run.weights, *kept_of(run.optimizer)]
    before = bits(kept)
    run.steps(1)
    assert int(run.optimizer.skipped_steps) == 1
    assert bits(kept) == before


def special(dtype):
    """Weights that a user may assign, among them powers of two and a mask's -inf."""
    is_float16 = dtype == "float16"
    largest = 65504.0 if is_float16 else (2 - 2**-7) * 2.0**127
    # Of float32's subnormals a compiler makes 0.
    smallest = [2.0**-24, 2.0**-14] if is_float16 else [2.0**-125]
    some = [0.0, largest, *smallest, 1.0, 0.25, 0.3, 3.0, np.inf]
    return np.float32([*some, *(-value for value in some), np.nan])


@pytest.mark.parametrize("make", [K.SGD, K.Adadelta])
@pytest.mark.parametrize("kind", KINDS)
@of_each_dtype
def test_assigned_weight_survives_zero_step(way, dtype, kind, make, monkeypatch):
    run = Run(make, dtype, kind).steps(4)
    values = [np.resize(special(dtype), s) for s in SHAPES]
    assigned = [ops.cast(ops.convert_to_tensor(v), dtype) for v in values]
    for weight, value in zip(run.weights, assigned, strict=True):
        weight.assign(value)
    for _ in range(2):
        run.optimizer.apply([ops.zeros(s) for s in SHAPES], run.weights)
    for weight, value in zip(run.weights, assigned, strict=True):
        found, expected = (
            ops.convert_to_numpy(ops.cast(v, "float32")) for v in (weight, value)
        )
        if dtype == "float16":
            expected = np.clip(expected, -65504.0, 65504.0)
        np.testing.assert_array_equal(found, expected)
        has_sign = ~np.isnan(found)
        np.testing.assert_array_equal(
            np.signbit(found)[has_sign], np.signbit(expected)[has_sign]
        )


def test_stochastic_rounding_preserves_small_updates_on_average():
    start = np.ones((64, 64), "float32")
    w = keras.Variable(start, dtype="bfloat16")
    optimizer = keras_lso.GuardedOptimizer(K.SGD(1.0), master_weights="stochastic")
    for _ in range(100):
        optimizer.apply([ops.full((64, 64), 1e-4)], [w])
    found = ops.convert_to_numpy(ops.cast(w, "float32")).astype("float64")
    # Below 1 a unit is 2**-8, and a sum of 100 roundings is off by up to 5 of them; of
    # 4,096 weights the mean is off by a 64th of the deviation.
    error = np.sqrt(100 * 1e-4 * 2.0**-8) / 64
    assert abs(found.mean() - 0.99) <= 4 * error
    assert found.std() > 0


def test_weights_overwritten_by_averages_are_rounded_without_bias():
    """Such a step rounds twice. With the same bits, both go up together."""
    unit = 2.0**-7
    w = keras.Variable(np.ones(2**16, "float32"), dtype="bfloat16")
    inner = K.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1)
    optimizer = keras_lso.GuardedOptimizer(inner, master_weights="stochastic")
    for _ in range(2):
        optimizer.apply([ops.full((2**16,), -0.5 * unit)], [w])
    found = ops.convert_to_numpy(ops.cast(w, "float32")).astype("float64")
    # The first average is 0.5 units above 1, the second one half of that and of 1. Each
    # of four roundings has a deviation of half a unit at most.
    error = np.sqrt(4 * 0.25) / 2**8
    assert abs((found.mean() - 1) / unit - 0.75) <= 4 * error


@of_each_dtype
@pytest.mark.parametrize("name", ["adam", "lars", "adadelta", "averaged"])
@pytest.mark.exhaustive
def test_equal_stochastic_runs_are_bitwise_equal(name, dtype):
    one, other = (Run(MAKES[name], dtype, "stochastic").steps(6) for _ in "ab")
    assert one.state() == other.state()


def test_equal_weights_are_rounded_with_different_random_bits():
    pair = [keras.Variable(np.ones(1000, "float32"), dtype="bfloat16") for _ in "ab"]
    optimizer = keras_lso.GuardedOptimizer(K.SGD(1.0), master_weights="stochastic")
    optimizer.apply([ops.full((1000,), 1e-3)] * 2, pair)
    assert len(set(bits(pair))) == 2


def loaded(run, kind, make, dtype, steps=0, slots=None):
    """A run of another kind that goes on from the state and the weights of one.

    It has taken steps of its own before.
    """
    store = saved(run.optimizer)
    new = Run(make, dtype, kind, slots=slots).steps(steps)
    for weight, old in zip(new.weights, run.weights, strict=True):
        weight.assign(ops.convert_to_tensor(old))
    new.optimizer.load_own_variables(store)
    new.random, new.taken = copy.deepcopy(run.random), run.taken
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
    run = Run(make, dtype, kind, slots=slots).steps(4)
    new = loaded(run, other, make, dtype, slots=others)
    pairs = [r.optimizer.inner_optimizer.variables for r in (run, new)]
    for old, found in zip(*pairs, strict=True):
        right = np.asarray(ops.convert_to_numpy(old)).astype(found.dtype)
        assert bits([found]) == bits([right])
    assert bits(new.weights) == bits(run.weights)
    if other != "stochastic":
        for found, right in zip(new.numbers(), run.numbers(), strict=True):
            # At a tie the other kind takes the next number.
            np.testing.assert_allclose(found, right, rtol=2.0**-23, atol=2.0**-39)
    new.steps(3)


@of_each_kind
@of_each_dtype
@pytest.mark.parametrize(
    "name, slots",
    [*((name, None) for name in ("adamw", "accumulated", "adadelta")), NARROW],
)
@pytest.mark.exhaustive
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(name, slots, dtype, kind):
    run = Run(MAKES[name], dtype, kind, slots=slots).steps(4)
    new = loaded(run, kind, MAKES[name], dtype, slots=slots)
    assert new.steps(3).state() == run.steps(3).state()


def tolerance_of(name, dtype):
    """By how much one step loses of a number that a kind keeps."""
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
    """Each attribute of a kind has another value in one of these than in ours."""
    monkeypatch.setitem(codecs.CODECS, kind, OTHER_CODECS[kind])
    make = MAKES[name]
    run = Run(make, dtype, kind).steps(4)
    other = Run(make, dtype, "float32").steps(7)
    new = loaded(run, kind, make, dtype, steps=2)
    for _ in range(3):
        before = bits([*run.weights, *run.optimizer._masters.variables])
        run.steps(1)
        if run.taken == 5:
            assert bits([*run.weights, *run.optimizer._masters.variables]) == before
    for found in (run, new.steps(3)):
        for ours, right in zip(found.numbers(), other.numbers(), strict=True):
            atol = 7 * tolerance_of(kind, dtype)
            np.testing.assert_allclose(ours, right, rtol=0, atol=atol)
    if kind == "noisy":
        assert bits(run.weights) != bits(other.weights)


@of_each_kind
def test_file_without_masters_restarts_from_weights(kind):
    make = MAKES["adam"]
    run = Run(make, "bfloat16", False).steps(3)
    new = loaded(run, kind, make, "bfloat16", steps=2)
    for number, weight in zip(new.numbers(), run.weights, strict=True):
        np.testing.assert_array_equal(
            number, ops.convert_to_numpy(ops.cast(weight, "float32"))
        )


@pytest.mark.parametrize("kind", ["auto", False, *KINDS[1:]])
def test_config_has_kind_that_is_not_default_and_round_trips(kind):
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(), master_weights=kind)
    config = optimizer.get_config()
    assert config.get("master_weights", "auto") is kind
    assert ("master_weights" in config) is (kind != "auto")
    again = keras_lso.LossScaleOptimizer.from_config(config)
    assert again.master_weights is kind


@of_each_kind
def test_deepcopy_keeps_kind_and_leaves_original_unchanged(kind):
    run = Run(MAKES["adam"], "bfloat16", kind).steps(2)
    before = run.state()
    twin = copy.deepcopy(run.optimizer)
    assert twin.master_weights == kind
    assert run.state() == before


@of_each_kind
@of_each_dtype
@pytest.mark.parametrize(
    "name, slots",
    [*((name, None) for name in ("adam", "lars", "adadelta")), NARROW],
)
@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="TensorFlow has no stateless_apply"
)
@pytest.mark.exhaustive
def test_stateless_step_is_bitwise_equal_to_step(name, slots, dtype, kind):
    run, twin = (Run(MAKES[name], dtype, kind, slots=slots).steps(2) for _ in "ab")
    weights = [v.value for v in run.weights]
    state = [v.value for v in run.optimizer.variables]
    before = run.state()
    for _ in range(2):
        weights, state = run.optimizer.stateless_apply(
            state, run.gradients(), weights, scaled=True
        )
        assert run.state() == before
    twin.steps(2)
    assert (bits(weights), bits(state)) == twin.state()


@pytest.mark.parametrize("kind", KINDS)
@of_each_dtype
@pytest.mark.exhaustive
def test_finalize_variable_values_assigns_averages_to_weights(dtype, kind):
    run = Run(lambda rate: K.SGD(rate, use_ema=True), dtype, kind).steps(3)
    inner = run.optimizer.inner_optimizer
    averages = [ops.convert_to_numpy(v) for v in inner._model_variables_moving_average]
    run.optimizer.finalize_variable_values(run.weights)
    for weight, average in zip(run.weights, averages, strict=True):
        found = ops.convert_to_numpy(ops.cast(weight, "float32"))
        unit = 2.0**-10 if dtype == "float16" else 2.0**-7
        np.testing.assert_allclose(found, average, rtol=unit, atol=2.0**-24)
    if kind == "float32":
        for number, average in zip(run.numbers(), averages, strict=True):
            np.testing.assert_array_equal(number, average)


@of_each_kind
def test_sparse_gradients_step_like_float32_masters(kind):
    from testing.tensors import sparse_gradient

    values = ops.convert_to_tensor(np.ones((2, 4), "float32"))
    results = []
    for of_kind in (kind, "float32"):
        w = keras.Variable(np.ones((5, 4), "float32"), dtype="bfloat16")
        optimizer = keras_lso.GuardedOptimizer(K.Adam(0.1), master_weights=of_kind)
        optimizer.build([w])
        for _ in range(2):
            optimizer.apply([sparse_gradient(values, [1, 3], (5, 4))], [w])
        results.append(ops.convert_to_numpy(ops.cast(w, "float32")))
    # Two steps are rounded, each to one of two neighbours.
    np.testing.assert_allclose(*results, rtol=0, atol=2.0**-7)


@pytest.mark.skipif(
    backend.LENDS_MEMORY, reason="here what an optimizer steps on lasts for a step"
)
def test_remainder_kind_keeps_no_int16_state_without_fused_step():
    """TensorFlow's steps write variables, which keep their memory."""
    run = Run(K.Adadelta, "bfloat16", "remainder").steps(2)
    assert not kept_of(run.optimizer)
    assert run.optimizer.get_config()["master_weights"] == "remainder"


def test_clipping_set_after_build_steps_remainders_like_float32_masters():
    """A constraint that is set after `build` takes the fused step away."""
    runs = [Run(K.Adam, "bfloat16", kind) for kind in ("remainder", "float32")]
    for run in runs:
        run.steps(3)
        run.optimizer.inner_optimizer.clipnorm = 0.5
        run.optimizer.inner_optimizer.clipvalue = 0.1
        run.steps(3)
    assert_same_numbers(*runs, "bfloat16")
