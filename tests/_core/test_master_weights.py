"""Float16 and bfloat16 variables train through float32 masters."""

import functools
import re
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.trained_optimizers import saved

K = keras.optimizers
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def variable(values, dtype="float16"):
    return keras.Variable(np.array(values, DTYPES.get(dtype, dtype)), dtype=dtype)


def gradient(values, scale=1.0):
    return ops.convert_to_tensor(np.array(values, "float32") * scale)


def wrap(inner, **arguments):
    return keras_lso.LossScaleOptimizer(inner, initial_scale=4.0, **arguments)


class OwnStep(K.SGD):
    """An optimizer without a rule: its step is not fused."""


BOTH_WAYS = pytest.mark.parametrize("make", [K.SGD, OwnStep])


def masters(optimizer):
    return [ops.convert_to_numpy(v) for v in optimizer.variables[-2:-1]]


def as_float(variable):
    return ops.convert_to_numpy(ops.cast(variable, "float32"))


@BOTH_WAYS
def test_steps_too_small_for_float16_accumulate_in_master(make):
    with_masters, without = variable([1.0]), variable([1.0])
    ours = wrap(make(1.0))
    plain = wrap(make(1.0), master_weights=False)
    for _ in range(100):
        ours.apply([gradient([1e-4], 4.0)], [with_masters])
        plain.apply([gradient([1e-4], 4.0)], [without])
    # The spacing of float16 numbers below 1 is 0.0005.
    np.testing.assert_allclose(as_float(with_masters), [0.99], atol=0.00025)
    assert as_float(without) == [1.0]


def test_float32_or_overwritten_variable_has_no_master():
    float32, float16 = variable([1.0], "float32"), variable([1.0])
    scale = variable([1.0])
    scale.overwrite_with_gradient = True
    optimizer = wrap(K.SGD(0.5))
    optimizer.build([float32, float16, scale])
    assert len(optimizer.variables) == 2 + 2 + 2 + 1 + 1
    assert masters(optimizer)[0].dtype == np.float32
    optimizer.apply([gradient([1.0], 4.0)] * 2, [float32, float16])
    assert as_float(float32) == as_float(float16) == [0.5]


@pytest.mark.parametrize("master_weights, count", [("auto", 1), (True, 1), (False, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_master_weights_argument_sets_number_of_masters(dtype, master_weights, count):
    optimizer = wrap(K.SGD(0.5), master_weights=master_weights)
    optimizer.build([variable([1.0], dtype)])
    assert len(optimizer.variables) == 2 + 2 + 2 + count + 1


@BOTH_WAYS
def test_master_restarts_only_where_variable_was_assigned(make):
    w = variable([1.0, 2.0])
    optimizer = wrap(make(1.0))
    optimizer.apply([gradient([1e-4, 1e-4], 4.0)], [w])
    w.assign(ops.cast(ops.array([5.0, 2.0]), "float16"))
    optimizer.apply([gradient([1e-4, 1e-4], 4.0)], [w])
    # The first starts again at 5, the second goes on from 2 - 1e-4.
    np.testing.assert_allclose(masters(optimizer)[0], [5 - 1e-4, 2 - 2e-4], rtol=1e-7)


@pytest.mark.parametrize("size", [3, 8])
def test_assignment_to_any_element_reaches_master(size):
    w = variable([1.0] * size)
    optimizer = wrap(K.SGD(1.0))
    optimizer.build([w])
    for i in range(size):
        values = np.ones(size, "float16")
        values[i] = 5.0
        w.assign(values)
        optimizer.apply([gradient([0.0] * size)], [w])
        np.testing.assert_array_equal(masters(optimizer)[0], values)


@BOTH_WAYS
def test_float16_variable_saturates_while_master_keeps_value(make):
    w = variable([60000.0])
    optimizer = wrap(make(1.0))
    optimizer.apply([gradient([-1e5], 4.0)], [w])
    assert as_float(w) == [65504.0]
    assert masters(optimizer)[0] == [160000.0]
    optimizer.apply([gradient([1e5], 4.0)], [w])
    assert as_float(w) == [60000.0]


def test_master_carries_path_constraint_and_exclusion():
    with keras.name_scope("block"):
        w = variable([1.0])
        excluded = variable([1.0])
    w.constraint = keras.constraints.NonNeg()
    inner = K.SGD(1.0, weight_decay=0.5)
    inner.exclude_from_weight_decay(var_list=[excluded])
    optimizer = wrap(inner)
    optimizer.build([w, excluded])
    assert [v.path for v in optimizer.variables[-3:-1]] == [w.path, excluded.path]
    optimizer.apply([gradient([9.0], 4.0), gradient([0.0])], [w, excluded])
    assert as_float(w) == [0.0]
    assert as_float(excluded) == [1.0]


def test_finalize_variable_values_keeps_assigned_weight():
    w = variable([1.0])
    optimizer = wrap(K.SGD(1.0))
    optimizer.apply([gradient([0.5], 4.0)], [w])
    w.assign(ops.cast(ops.array([7.0]), "float16"))
    optimizer.finalize_variable_values([w])
    assert as_float(w) == [7.0]


@pytest.mark.parametrize("use_ema", [True, False])
def test_finalize_variable_values_ignores_unknown_variable(use_ema):
    w, unknown = variable([1.0]), variable([2.0])
    optimizer = wrap(K.SGD(1.0, use_ema=use_ema))
    optimizer.apply([gradient([0.5], 4.0)], [w])
    optimizer.finalize_variable_values([w, unknown])
    assert as_float(unknown) == [2.0]


def test_inner_optimizer_already_trained_on_float16_is_rejected():
    w = variable([1.0])
    inner = K.SGD(1.0)
    inner.apply([gradient([0.5])], [w])
    optimizer = wrap(inner)
    with pytest.raises(
        ValueError, match="has been built already.*master_weights=False"
    ):
        optimizer.apply([gradient([0.5])], [w])


def test_error_of_master_weights_names_each_choice_once():
    names = "'auto', True, False, 'float32', 'remainder', 'remainder8', 'stochastic'"
    with pytest.raises(ValueError, match=rf"be one of {names}\. R"):
        wrap(K.SGD(), master_weights="bfloat16")


def test_compiled_step_creates_and_updates_masters(compiled):
    """On JAX, `build` creates them: under `jax.jit` there are no values to copy."""
    w = variable([1.0])
    optimizer = wrap(K.SGD(1.0))
    if keras.backend.backend() == "jax":
        optimizer.build([w])
    variables = [w, *optimizer.variables] if optimizer.built else [w]
    step = compiled(lambda g: optimizer.apply([g], [w]), variables)
    for _ in range(3):
        step(gradient([1e-4], 4.0))
    np.testing.assert_allclose(masters(optimizer)[0], [1 - 3e-4], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_finalize_variable_values_ignores_averages_before_first_step(dtype):
    w = variable([3.0], dtype)
    optimizer = wrap(K.SGD(1.0, use_ema=True))
    optimizer.apply([gradient([np.inf])], [w])
    optimizer.finalize_variable_values([w])
    assert as_float(w) == [3.0]


@pytest.mark.parametrize("dtype, calls", [("float32", 1), ("float16", 0)])
def test_inner_finalize_variable_values_is_called_only_without_masters(dtype, calls):
    """With masters, it is called only if it has averages to assign."""
    finalized = []

    class Finalizing(K.SGD):
        def finalize_variable_values(self, var_list):
            finalized.append(var_list)

    w = variable([3.0], dtype)
    optimizer = wrap(Finalizing(1.0))
    optimizer.build([w])
    optimizer.finalize_variable_values([w])
    assert len(finalized) == calls


@pytest.mark.parametrize("inner", [K.Adam, K.RMSprop])
def test_bare_tensorflow_variable_trains_through_master(inner):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras's optimizers take bare variables on TensorFlow only")
    import tensorflow as tf

    bare, w = tf.Variable([1.0, -2.0], dtype="float16"), variable([1.0, -2.0])
    for trained in (bare, w):
        optimizer = wrap(inner(0.01))
        for scale in (4.0, np.inf, 2.0):
            optimizer.apply([gradient([1.0, 0.5], scale)], [trained])
        # A restart, and a step that float16 rounds.
        trained.assign([3.0, 4.0])
        optimizer.apply([gradient([1.0, 0.5], 2.0)], [trained])
    assert as_float(bare).tolist() == as_float(w).tolist() != [3.0, 4.0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["float32", "remainder", "remainder8", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_model_built_by_its_first_batch_trains_as_one_built_before(dtype, kind):
    """On TensorFlow the weights have no values while their masters are made."""
    x = np.linspace(-1.0, 1.0, 32, dtype="float32").reshape(8, 4)
    trained = []
    for shape in (), (keras.Input((4,)),):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([*shape, keras.layers.Dense(2, dtype=dtype)])
        optimizer = wrap(K.Adam(0.01), master_weights=kind)
        model.compile(optimizer, "mse")
        model.fit(x, x[:, :2], batch_size=4, verbose=0, shuffle=False)
        trained.append([as_float(w) for w in model.weights])
    for unbuilt, built in zip(*trained, strict=True):
        np.testing.assert_array_equal(unbuilt, built)


@pytest.mark.parametrize("policy", ["dynamic", "auto"])
def test_bfloat16_state_without_masters_loads_and_restarts_masters(policy):
    """Files of bfloat16 weights had no masters once."""
    scale = {"initial_scale": "auto"} if policy == "auto" else {}
    before = keras_lso.LossScaleOptimizer(K.Adam(0.25), master_weights=False, **scale)
    after = keras_lso.LossScaleOptimizer(K.Adam(0.25), **scale)
    old, new = variable([1.0, 3.0], "bfloat16"), variable([1.0, 3.0], "bfloat16")
    before.apply([gradient([1.0, -1.0])], [old], scaled=False)
    after.build([new])
    new.assign(old)
    after.load_own_variables(saved(before))
    assert int(after.iterations) == 1
    [momentum] = [v for v in after.inner_optimizer.variables if "momentum" in v.path]
    assert momentum.dtype == "float32"
    np.testing.assert_allclose(as_float(momentum), [0.1, -0.1], rtol=2**-8)
    after.apply([gradient([1.0, -1.0])], [new], scaled=False)
    [master] = after._masters.variables
    # Without masters Adam moves nothing: its `beta_2` is 1 in bfloat16.
    np.testing.assert_array_equal(as_float(old), [1.0, 3.0])
    np.testing.assert_allclose(as_float(master), [0.75, 3.25], rtol=2**-8)


def warnings_of(make, dtypes, **options):
    variables = [keras.Variable(np.ones(1), dtype=dtype) for dtype in dtypes]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        keras_lso.LossScaleOptimizer(make(), **options).build(variables)
    return [str(w.message) for w in seen]


def test_epsilon_that_is_zero_in_float16_warns():
    small = functools.partial(K.Adam, epsilon=1e-8)
    [message] = warnings_of(small, ["float16"], master_weights=False)
    for words in ("`epsilon=1e-08` is 0", "Adam", "float16", "`epsilon=1e-4`"):
        assert words in message
    [message] = warnings_of(K.Adafactor, ["float16"], master_weights=False)
    assert "`epsilon_1=1e-30`" in message and "`epsilon_1=1e-4`" in message
    # Masters and our own optimizers compute in float32.
    assert not warnings_of(small, ["float16"])
    assert not warnings_of(small, ["float32"], master_weights=False)
    assert not warnings_of(K.Adam, ["float16"], master_weights=False)
    ours = functools.partial(keras_lso.LAMB, epsilon=1e-8)
    assert not warnings_of(ours, ["float16"], master_weights=False)


@pytest.mark.parametrize("cls", [K.Adam, K.AdamW, K.Nadam, K.Adamax, K.Lamb])
def test_advised_epsilon_makes_steps_of_the_rate_in_float16(cls):
    """The square of such a gradient is 0 in float16, as is a tenth of 1e-7."""
    small = functools.partial(cls, 2.0**-7, epsilon=1e-8)
    [message] = warnings_of(small, ["float16"], master_weights=False)
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
