"""`slot_dtype`: moments in bfloat16."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import BACKEND, Harness, array
from testing.masters import hashed
from testing.optimizers import OPTIMIZERS, rule_of
from testing.tensors import sparse_gradient

K = keras.optimizers
WITH_MOMENTS = {
    name: make for name, make in OPTIMIZERS.items() if rule_of(make).has_moments
}
KINDS = ["float32", "remainder", "remainder8", "stochastic"]


def guarded(inner, start, dtype="float32", **arguments):
    optimizer = keras_lso.GuardedOptimizer(inner, slot_dtype="bfloat16", **arguments)
    return Harness(optimizer, start, dtype)


def wide(variable):
    return array(ops.cast(variable, "float32"))


# --- The bits -----------------------------------------------------------------------


def rounded(numbers, position, step, shift=0):
    """Returns float32 numbers rounded stochastically to bfloat16, in float32."""
    with np.errstate(over="ignore"):
        key = hashed(np.uint32(step) + np.uint32(position) * np.uint32(0x85EBCA77))
        places = np.arange(numbers.size, dtype=np.uint32).reshape(numbers.shape)
        random = hashed(places * np.uint32(0x9E3779B1) + key)
        random = (random >> np.uint32(shift)) & np.uint32(0xFFFF)
        up = numbers.view(np.uint32) + random
    return (up & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_slots_have_the_bits_of_the_reference(steps, each_way):
    # Products with powers of two are exact, so that each sum is rounded once.
    run = guarded(K.SGD(2.0**-7, momentum=0.5), [(3, 5), (2000,)])
    weights, applied = run.values(), 0
    slots = [np.zeros_like(w) for w in weights]
    for step in range(steps):
        if step % 7 == 3:
            run.overflow()
            continue
        grads = run.gradients()
        run.step(grads)
        for i, grad in enumerate(grads):
            number = slots[i] * np.float32(0.5) - grad * np.float32(2.0**-7)
            weights[i] = weights[i] + number
            slots[i] = rounded(number, i + 2 * 2**24, applied)
        applied += 1
    for value, weight in zip(run.values(), weights, strict=True):
        assert value.tobytes() == weight.tobytes()
    for variable, slot in zip(run.inner.momentums, slots, strict=True):
        assert variable.dtype == "bfloat16"
        assert wide(variable).tobytes() == slot.tobytes()


def test_two_slots_share_the_bits_of_a_hash(each_way):
    run = guarded(K.Adam(beta_1=0.75, beta_2=0.75), [(50, 40)])
    columns = [run.inner._momentums[0], run.inner._velocities[0]]
    for slot in columns:
        slot.assign(ops.abs(ops.convert_to_tensor(run.weights[0])))
    slots = [wide(slot) for slot in columns]
    # Without a gradient, a step multiplies by 0.75, which is exact in float32.
    for step in range(20):
        run.step(size=0.0)
        for i, shift in enumerate([0, 16]):
            number = slots[i] * np.float32(0.75)
            slots[i] = rounded(number, 2 * 2**24, step, shift)
            assert wide(columns[i]).tobytes() == slots[i].tobytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", WITH_MOMENTS.values(), ids=WITH_MOMENTS)
def test_skipped_steps_change_no_bit(make, dtype, each_way):
    for kind in KINDS if dtype == "bfloat16" else KINDS[:1]:
        shapes = [(3, 5), (17,), (), (40, 30)]
        run = guarded(make(0.01), shapes, dtype, master_weights=kind)
        for bad in (np.nan, np.inf):
            run.steps(2)
            run.overflow(bad)


# --- The effect of the rounding -----------------------------------------------------


def test_second_moments_decay_where_nearest_rounding_freezes_them():
    run = guarded(K.Adam(1e-4, beta_2=0.999), [(64, 64)])
    right, nearest = np.float32(0), []
    for step in range(350):
        grad = np.float32(step < 50)
        run.step([np.full((64, 64), grad)])
        right = right + np.float32(0.001) * (grad - right)
        old = nearest[-1] if nearest else np.float32(0)
        number = old + np.float32(0.001) * (grad - old)
        nearest.append(number.astype(ml_dtypes.bfloat16).astype("float32"))
    assert nearest[49] == nearest[-1] > 1.3 * right
    [velocity] = run.inner._velocities
    assert velocity.dtype == "bfloat16"
    # Each element deviates by some percent, the mean of 4096 by a 64th of that.
    np.testing.assert_allclose(wide(velocity).mean(), right, rtol=0.005)
    assert 0.01 < wide(velocity).std() / right < 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", WITH_MOMENTS.values(), ids=WITH_MOMENTS)
def test_training_stays_near_that_with_float32_slots(make, dtype, each_way):
    moves = []
    for slot_dtype in ("bfloat16", None):
        optimizer = keras_lso.LossScaleOptimizer(make(0.01), slot_dtype=slot_dtype)
        run = Harness(optimizer, [(30, 40), (40,)], dtype)
        start = run.values()
        for _ in range(10):
            run.step([1 + g for g in run.gradients(size=0.1)], dtype="float32")
        pairs = zip(run.values(), start, strict=True)
        moves.append(np.mean(np.concatenate([(a - b).ravel() for a, b in pairs])))
    # A moment is rounded by at most 1/128 in each step.
    np.testing.assert_allclose(*moves, rtol=0.02)


def test_no_moment_becomes_infinite(each_way):
    # It is finite in float32, and beyond the largest bfloat16.
    run = guarded(K.SGD(1.0, momentum=0.5), [keras.Variable(np.zeros(3, "float32"))])
    for grad in (-3.399e38, 3.399e38, 1.0):
        assert run.step([np.full(3, grad, "float32")])
        largest = float(ml_dtypes.finfo("bfloat16").max)
        assert np.all(np.abs(wide(run.inner.momentums[0])) <= largest)
        assert np.all(np.isfinite(run.values()))


@pytest.mark.parametrize(
    "limit, expected",
    [
        ({"clipvalue": 2.0}, [2.0, -2.0]),
        ({"clipnorm": 2.5}, [1.5, -2.0]),
        ({"global_clipnorm": 2.5}, [1.5, -2.0]),
    ],
)
def test_mean_of_accumulated_gradients_is_clipped(limit, expected, each_way):
    inner = K.SGD(1.0, momentum=0.5, gradient_accumulation_steps=2, **limit)
    run = guarded(inner, [keras.Variable(np.zeros(2, "float32"))])
    for grad in ([2.0, -6.0], [4.0, -2.0]):
        run.step([np.float32(grad)])
    np.testing.assert_allclose(-run.values()[0], expected, rtol=1e-6)


# --- Which slots, and of which optimizers -------------------------------------------


def test_moments_alone_are_narrow():
    inner = K.Nadam(0.01, use_ema=True, gradient_accumulation_steps=2, name="optimizer")
    optimizer = guarded(inner, [(2, 3)]).optimizer
    narrow = [v.name for v in optimizer.variables if v.dtype == "bfloat16"]
    assert [name.rpartition("_")[2] for name in narrow] == ["momentum", "velocity"]
    of_averages = *inner._model_variables_moving_average, inner._u_product
    for variable in [*of_averages, *inner._accumulated_gradients]:
        assert variable.dtype == "float32"
    novograd = guarded(keras_lso.NovoGrad(0.01), [(2, 3)]).inner
    assert novograd.momentums[0].dtype == "bfloat16"
    assert novograd.second_moments[0].dtype == "float32"


@pytest.mark.parametrize(
    "dtype, kind, expected",
    [
        ("bfloat16", "stochastic", 2 + 4),
        ("bfloat16", "remainder", 4 + 4),
        ("bfloat16", "remainder8", 3 + 4),
        ("bfloat16", "float32", 6 + 4),
        ("float32", "float32", 4 + 4),
    ],
)
def test_bytes_of_a_weight_with_adam(dtype, kind, expected):
    # With the gradient, in the dtype of the weight, 8, 10, 9, 12 and 12.
    run = guarded(K.Adam(), [(300, 200)], dtype, master_weights=kind)
    sizes = {"int8": 1, "int16": 2, "bfloat16": 2, "float32": 4}
    variables = [*run.weights, *run.optimizer.variables]
    large = [v for v in variables if v.shape == (300, 200)]
    assert sum(sizes[v.dtype] for v in large) == expected


@pytest.mark.parametrize(
    "make",
    [
        K.Adagrad,
        K.Adadelta,
        lambda: K.Adam(amsgrad=True),
        lambda: keras_lso.LARC(K.SGD(momentum=0.9)),
    ],
)
def test_an_optimizer_without_moments_of_a_rule_is_refused(make):
    with pytest.raises(ValueError, match="exists for Adam, AdamW, Adamax, LAMB, LARS,"):
        guarded(make(), [(2,)])


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match="be one of None, 'bfloat16', 'int8'"):
        keras_lso.LossScaleOptimizer(K.Adam(), slot_dtype="float16")
    with pytest.raises(ValueError, match="`master_weights='stochastic'`. Received: we"):
        guarded(K.Adam(), [(2,)], "bfloat16", master_weights=False)
    adam = K.Adam()
    adam.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="has been built already, with slots of its"):
        guarded(adam, [(1,)])
    optimizer = guarded(K.Adam(), [(2,)]).optimizer
    with pytest.raises(AttributeError, match="`slot_dtype` of a GuardedOptimizer"):
        optimizer.slot_dtype = None


def test_a_step_without_a_rule_is_refused_and_changes_nothing():
    run = guarded(K.Adam(use_ema=True), [(2,), (3,)])
    refused = pytest.raises(ValueError, match="a gradient for each variable")
    with run.unchanged(*run.optimizer.variables), refused:
        run.apply([ops.ones(2), None])


def test_a_hyperparameter_that_ends_the_rule_is_named(each_way):
    run = guarded(K.Adam(), [(2,)])
    run.inner.amsgrad = True
    with pytest.raises(ValueError, match="or set a changed attribute back"):
        run.step()
    run.inner.amsgrad = False
    run.step()


# --- Gradients ----------------------------------------------------------------------


def test_gradients_of_each_form_step_alike(each_way):
    value, ends = np.zeros((5, 3), "float32"), []
    value[1], value[3] = 0.5, 2.0
    makes = [ops.convert_to_tensor, sparse]
    if BACKEND != "jax":  # It has no float64 by default.
        makes.append(lambda v: ops.convert_to_tensor(v.astype("float64"), "float64"))
    for make in makes:
        run = guarded(K.Adam(0.1), [(5, 3)])
        for _ in range(3):
            run.apply([make(value)])
        ends.append(run.bits())
    assert all(end == ends[0] for end in ends)


def sparse(value):
    """Returns a sparse gradient with the same row twice."""
    values = np.stack([value[1] / 2, value[3], value[1] / 2])
    return sparse_gradient(values, [1, 3, 1], value.shape)


def test_fit_trains_with_each_kind_of_weights():
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    for policy, kind in [("mixed_bfloat16", "float32"), ("bfloat16", "stochastic")]:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(16, "relu", dtype=policy)
        layers = [keras.Input((8,)), hidden, keras.layers.Dense(1, dtype=policy)]
        model = keras.Sequential(layers)
        optimizer = keras_lso.GuardedOptimizer(
            K.Adam(0.01), master_weights=kind, slot_dtype="bfloat16"
        )
        model.compile(optimizer, loss="mse")
        history = model.fit(x, x[:, :1], batch_size=16, epochs=15, verbose=0)
        assert history.history["loss"][-1] < 0.2 * history.history["loss"][0]
        assert optimizer.inner_optimizer._velocities[0].dtype == "bfloat16"
