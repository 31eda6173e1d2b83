"""Moments in bfloat16: `slot_dtype`."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.beside_keras import WAYS, bits, take
from testing.kernels import off
from testing.masters import hashed
from testing.optimizers import OPTIMIZERS, rule_of
from testing.tensors import sparse_gradient

K = keras.optimizers
WITH_MOMENTS = {
    name: make for name, make in OPTIMIZERS.items() if rule_of(make).has_moments
}
KINDS = ["float32", "remainder", "stochastic"]
pytestmark = pytest.mark.each_backend


@pytest.fixture(params=[*WAYS, "generic"])
def way(request, monkeypatch):
    """The way in which steps are made."""
    if request.param != "generic":
        take(request.param, monkeypatch)
        yield request.param
        return
    with off():
        yield request.param


def variables_of(*shapes, dtype="float32"):
    random = np.random.default_rng(0)
    values = [random.normal(size=shape).astype("float32") for shape in shapes]
    return [keras.Variable(value, dtype=dtype) for value in values]


def guarded(inner, variables, **arguments):
    optimizer = keras_lso.GuardedOptimizer(inner, slot_dtype="bfloat16", **arguments)
    optimizer.build(variables)
    return optimizer


def wide(variable):
    return ops.convert_to_numpy(ops.cast(variable, "float32"))


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
def test_slots_have_the_bits_of_the_reference(steps, way):
    variables = variables_of((3, 5), (2000,))
    weights = [wide(v) for v in variables]
    slots = [np.zeros_like(w) for w in weights]
    # Products with powers of two are exact, so that each sum is rounded once.
    optimizer = guarded(K.SGD(2.0**-7, momentum=0.5), variables)
    random, applied = np.random.default_rng(1), 0
    for step in range(steps):
        grads = [random.normal(size=w.shape).astype("float32") for w in weights]
        is_bad = step % 7 == 3
        for i, grad in enumerate(grads if not is_bad else []):
            number = slots[i] * np.float32(0.5) - grad * np.float32(2.0**-7)
            weights[i] = weights[i] + number
            slots[i] = rounded(number, i + 2 * 2**24, applied)
        applied += not is_bad
        grads[0][0] = np.inf if is_bad else grads[0][0]
        optimizer.apply(list(map(ops.convert_to_tensor, grads)), variables)
    for variable, weight in zip(variables, weights, strict=True):
        assert wide(variable).tobytes() == weight.tobytes()
    for variable, slot in zip(optimizer.inner_optimizer.momentums, slots, strict=True):
        assert variable.dtype == "bfloat16"
        assert wide(variable).tobytes() == slot.tobytes()


def test_two_slots_share_the_bits_of_a_hash(way):
    [variable] = variables = variables_of((50, 40))
    optimizer = guarded(K.Adam(beta_1=0.75, beta_2=0.75), variables)
    inner = optimizer.inner_optimizer
    columns = [inner._momentums[0], inner._velocities[0]]
    for slot in columns:
        slot.assign(ops.abs(ops.convert_to_tensor(variable)))
    slots = [wide(slot) for slot in columns]
    # Without a gradient, a step multiplies by 0.75, which is exact in float32.
    for step in range(20):
        optimizer.apply([ops.zeros((50, 40))], variables)
        for i, shift in enumerate([0, 16]):
            number = slots[i] * np.float32(0.75)
            slots[i] = rounded(number, 2 * 2**24, step, shift)
            assert wide(columns[i]).tobytes() == slots[i].tobytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", WITH_MOMENTS.values(), ids=WITH_MOMENTS)
def test_skipped_steps_change_no_bit(make, dtype, way):
    for kind in KINDS if dtype == "bfloat16" else KINDS[:1]:
        variables = variables_of((3, 5), (17,), (), (40, 30), dtype=dtype)
        optimizer = guarded(make(0.01), variables, master_weights=kind)
        for value in (1.0, -0.5, np.nan, 0.25, np.inf):
            grads = [ops.full(v.shape, 0.5, dtype=dtype) for v in variables]
            grads[1] = grads[1] * value
            before = bits([*variables, *optimizer.inner_optimizer.variables])
            optimizer.apply(grads, variables)
            after = bits([*variables, *optimizer.inner_optimizer.variables])
            assert (before == after) == (not np.isfinite(value))


# --- What the rounding does ---------------------------------------------------------


def test_second_moments_decay_where_nearest_rounding_freezes_them():
    [variable] = variables = variables_of((64, 64))
    optimizer = guarded(K.Adam(1e-4, beta_2=0.999), variables)
    right, nearest = np.float32(0), []
    for step in range(350):
        grad = np.float32(step < 50)
        optimizer.apply([ops.full(variable.shape, grad)], variables)
        right = right + np.float32(0.001) * (grad - right)
        old = nearest[-1] if nearest else np.float32(0)
        number = old + np.float32(0.001) * (grad - old)
        nearest.append(number.astype(ml_dtypes.bfloat16).astype("float32"))
    assert nearest[49] == nearest[-1] > 1.3 * right
    [velocity] = optimizer.inner_optimizer._velocities
    assert velocity.dtype == "bfloat16"
    # Each element deviates by some percent, the mean of 4096 by a 64th of that.
    np.testing.assert_allclose(wide(velocity).mean(), right, rtol=0.005)
    assert 0.01 < wide(velocity).std() / right < 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", WITH_MOMENTS.values(), ids=WITH_MOMENTS)
def test_training_stays_near_that_with_float32_slots(make, dtype, way):
    ends = []
    for slot_dtype in ("bfloat16", None):
        variables = variables_of((30, 40), (40,), dtype=dtype)
        optimizer = keras_lso.LossScaleOptimizer(make(0.01), slot_dtype=slot_dtype)
        random = np.random.default_rng(2)
        start = np.concatenate([wide(v).ravel() for v in variables])
        for _ in range(10):
            grads = [1.0 + 0.1 * random.normal(size=v.shape) for v in variables]
            grads = [ops.convert_to_tensor(g.astype("float32")) for g in grads]
            optimizer.apply(grads, variables, scaled=False)
        ends.append(np.concatenate([wide(v).ravel() for v in variables]) - start)
    # A moment is rounded by at most 1/128 in each step.
    np.testing.assert_allclose(ends[0].mean(), ends[1].mean(), rtol=0.02)


def test_no_moment_becomes_infinite(way):
    # It is finite in float32, and beyond the largest bfloat16.
    variables = [keras.Variable(np.zeros(3, "float32"))]
    optimizer = guarded(K.SGD(1.0, momentum=0.5), variables)
    [slot] = optimizer.inner_optimizer.momentums
    for grad in (-3.399e38, 3.399e38, 1.0):
        optimizer.apply([ops.full((3,), grad)], variables)
        largest = float(ml_dtypes.finfo("bfloat16").max)
        assert np.all(np.abs(wide(slot)) <= largest)
        assert np.all(np.isfinite(wide(variables[0])))
    assert int(optimizer.skipped_steps) == 0


# --- Which slots, and of which optimizers -------------------------------------------


def test_moments_alone_are_narrow():
    inner = K.Nadam(0.01, use_ema=True, gradient_accumulation_steps=2, name="optimizer")
    optimizer = guarded(inner, variables_of((2, 3)))
    narrow = [v.name for v in optimizer.variables if v.dtype == "bfloat16"]
    assert [name.rpartition("_")[2] for name in narrow] == ["momentum", "velocity"]
    of_averages = *inner._model_variables_moving_average, inner._u_product
    for variable in [*of_averages, *inner._accumulated_gradients]:
        assert variable.dtype == "float32"
    novograd = guarded(keras_lso.NovoGrad(0.01), variables_of((2, 3)))
    assert novograd.inner_optimizer.momentums[0].dtype == "bfloat16"
    assert novograd.inner_optimizer.second_moments[0].dtype == "float32"


@pytest.mark.parametrize(
    "dtype, kind, expected",
    [
        ("bfloat16", "stochastic", 2 + 4),
        ("bfloat16", "remainder", 4 + 4),
        ("bfloat16", "float32", 6 + 4),
        ("float32", "float32", 4 + 4),
    ],
)
def test_bytes_of_a_weight_with_adam(dtype, kind, expected):
    # With the gradient, in the dtype of the weight, 8, 10, 12 and 12.
    variables = variables_of((300, 200), dtype=dtype)
    optimizer = guarded(K.Adam(), variables, master_weights=kind)
    sizes = {"int16": 2, "bfloat16": 2, "float32": 4}
    large = [v for v in [*variables, *optimizer.variables] if v.shape == (300, 200)]
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
        guarded(make(), variables_of((2,)))


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match="`slot_dtype` must be None .float32. or 'bf"):
        keras_lso.LossScaleOptimizer(K.Adam(), slot_dtype="float16")
    with pytest.raises(ValueError, match="`master_weights='stochastic'`. Received: we"):
        guarded(K.Adam(), variables_of((2,), dtype="bfloat16"), master_weights=False)
    adam, variables = K.Adam(), variables_of((2,))
    adam.build(variables)
    with pytest.raises(ValueError, match="has been built already, with slots of its"):
        guarded(adam, variables)
    optimizer = guarded(K.Adam(), variables)
    with pytest.raises(AttributeError, match="`slot_dtype` of a GuardedOptimizer"):
        optimizer.slot_dtype = None


def test_a_step_without_a_rule_is_refused_and_changes_nothing():
    variables = variables_of((2,), (3,))
    optimizer = guarded(K.Adam(use_ema=True), variables)
    before = bits([*variables, *optimizer.variables])
    with pytest.raises(ValueError, match="a gradient for each variable"):
        optimizer.apply([ops.ones(2), None], variables)
    assert bits([*variables, *optimizer.variables]) == before


def test_a_hyperparameter_that_ends_the_rule_is_named(way):
    variables = variables_of((2,))
    optimizer = guarded(K.Adam(), variables)
    optimizer.inner_optimizer.amsgrad = True
    with pytest.raises(ValueError, match="or set a changed attribute back"):
        optimizer.apply([ops.ones(2)], variables)
    optimizer.inner_optimizer.amsgrad = False
    optimizer.apply([ops.ones(2)], variables)


def test_config_has_the_dtype_where_it_is_given():
    for cls in (keras_lso.LossScaleOptimizer, keras_lso.GuardedOptimizer):
        assert "slot_dtype" not in cls(K.Adam()).get_config()
        optimizer = cls(K.Adam(), slot_dtype="bfloat16")
        assert cls.from_config(optimizer.get_config()).slot_dtype == "bfloat16"


# --- Gradients ----------------------------------------------------------------------


def test_gradients_of_each_form_step_alike(way):
    value, ends = np.zeros((5, 3), "float32"), []
    value[1], value[3] = 0.5, 2.0
    makes = [ops.convert_to_tensor, sparse]
    if keras.backend.backend() != "jax":  # Which has no float64 by default.
        makes.append(lambda v: ops.convert_to_tensor(v.astype("float64"), "float64"))
    for make in makes:
        variables = variables_of((5, 3))
        optimizer = guarded(K.Adam(0.1), variables)
        for _ in range(3):
            optimizer.apply([make(value)], variables)
        ends.append(bits([*variables, *optimizer.variables]))
    assert all(end == ends[0] for end in ends)


def sparse(value):
    """Returns a sparse gradient in which a row comes twice."""
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
