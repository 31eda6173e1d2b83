"""Which gradients and variables `apply` accepts, and its errors for all others."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.compat.open_seq2seq import MixedPrecisionOptimizerWrapper
from keras_lso.loss_scales import DynamicLossScale
from testing.harness import BACKEND
from testing.keras_versions import multi_optimizer
from testing.refusals import refused


def sgd():
    return keras.optimizers.SGD(0.5, momentum=0.5)


OPTIMIZERS = {
    "SGD": lambda: keras_lso.LossScaleOptimizer(sgd(), initial_scale=1.0),
    "RMSprop": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.RMSprop(0.5), initial_scale=1.0
    ),
    "LARS": lambda: keras_lso.LossScaleOptimizer(
        keras_lso.LARS(0.5), initial_scale=1.0
    ),
    "LARC": lambda: keras_lso.LARC(sgd()),
    "LARS alone": lambda: keras_lso.LARS(0.5),
    "LAMB alone": lambda: keras_lso.LAMB(0.5),
    "NovoGrad alone": lambda: keras_lso.NovoGrad(0.5),
    "OpenSeq2Seq": lambda: MixedPrecisionOptimizerWrapper(sgd(), 1.0),
}


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def optimizer(request):
    return request.param()


@pytest.fixture
def variables():
    return [keras.Variable([1.0, 2.0], name="a"), keras.Variable(3.0, name="b")]


def gradients(*values):
    return [ops.convert_to_tensor(np.array(v)) for v in values]


def two_gradients():
    return gradients(np.float32([1, 1]), np.float32(1))


# The arguments, made of two variables, and the error.
REFUSED = {
    "swapped": (
        lambda v: (v, two_gradients()),
        (TypeError, "swapped", "optimizer.apply(grads, trainable_variables)"),
    ),
    "a tensor for a variable": (
        lambda v: (two_gradients(), [v[0], ops.array(3.0)]),
        (TypeError, "`trainable_variables`", "model.trainable_variables", "It holds"),
    ),
    "a dict": (
        lambda v: (dict(zip("ab", two_gradients(), strict=True)), v),
        (TypeError, "`grads`", "must be a list", "dict"),
    ),
    "one variable": (
        lambda v: (two_gradients(), v[0]),
        (TypeError, "`trainable_variables`", "must be a list"),
    ),
    "complex": (
        lambda v: (gradients(np.complex64([1, 1j]), np.float32(1)), v),
        (ValueError, "complex64", "(2,)", "keras.ops.real(gradient)"),
    ),
}


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_apply_rejects_wrong_arguments_and_changes_nothing(
    optimizer, variables, case, is_built, snapshot
):
    make, error = REFUSED[case]
    if is_built:
        optimizer.build(variables)
    before = snapshot([*variables, *optimizer.variables])
    with refused(*error):
        optimizer.apply(*make(variables))
    assert snapshot([*variables, *optimizer.variables]) == before
    assert optimizer.built is is_built


def test_apply_accepts_generators(optimizer, variables, snapshot):
    before = snapshot(variables)
    optimizer.apply((g for g in two_gradients()), (v for v in variables))
    assert int(optimizer.iterations) == 1
    assert all(a != b for a, b in zip(snapshot(variables), before, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "bool"])
@pytest.mark.parametrize("form", [list, np.asarray, ops.convert_to_tensor])
def test_integer_and_bool_gradients_step_like_float32_gradients(form, dtype):
    # Keras's bare optimizers do so on TensorFlow and JAX, and fail on PyTorch.
    for make in OPTIMIZERS.values():
        results = []
        for of in (dtype, "float32"):
            variable = keras.Variable([1.0, 2.0])
            optimizer = make()
            values = np.array([1, 3]).astype(dtype).astype(of)
            optimizer.apply([form(values)], [variable])
            results.append(ops.convert_to_numpy(variable))
        np.testing.assert_array_equal(*results)
        assert (results[0] != [1.0, 2.0]).any()


def test_sparse_integer_gradients_are_applied(sparse_gradient):
    variable = keras.Variable(np.ones((3, 1), "float32"))
    optimizer = keras_lso.LossScaleOptimizer(sgd(), initial_scale=1.0)
    rows = np.array([[2], [4]], "int32")
    optimizer.apply([sparse_gradient(rows, [0, 2], (3, 1))], [variable])
    assert ops.convert_to_numpy(variable)[:, 0].tolist() == [0.0, 1.0, -1.0]


def test_policy_and_unscaling_accept_integers_and_reject_complex():
    optimizer = keras_lso.LossScaleOptimizer(sgd(), initial_scale=2.0)
    [unscaled] = optimizer.get_unscaled_gradients(gradients(np.int32([1, 3])))
    assert ops.convert_to_numpy(unscaled).tolist() == [0.5, 1.5]
    policy = DynamicLossScale(8.0, increment_period=1)
    assert bool(policy.update(gradients(np.int32([1, 3])))[1])
    for method in (optimizer.get_unscaled_gradients, policy.update):
        with pytest.raises(ValueError, match=r"keras\.ops\.real"):
            method(gradients(np.complex64([1j])))
    assert float(policy()) == 16.0


WITHOUT_LIST = {
    "build": lambda o, v: o.build(v),
    "apply": lambda o, v: o.apply([v.value], v),
    "apply its tensor": lambda o, v: o.apply(v.value, [v]),
    "apply_gradients": lambda o, v: o.apply_gradients(v),
    "exclude_from_weight_decay": lambda o, v: o.exclude_from_weight_decay(var_list=v),
    "finalize_variable_values": lambda o, v: o.finalize_variable_values(v),
    "set_weights": lambda o, v: o.set_weights(v),
    "ratios": lambda o, v: o.ratios(v, [v]),
    "ratios of one": lambda o, v: o.ratios([v], v),
    "trust_ratios": lambda o, v: o.trust_ratios(v),
    "trust_ratios of one": lambda o, v: o.trust_ratios([v], v),
    "stateless_apply": lambda o, v: o.stateless_apply(v, [v.value], [v.value]),
    "stateless_apply to one": lambda o, v: o.stateless_apply(
        o.variables, [v.value], v.value
    ),
}


@pytest.fixture
def iterated(monkeypatch):
    """Returns the indices at which a variable was read: on JAX there is no last one."""
    indices = []

    def refuse(variable, index):
        indices.append(index)
        raise AssertionError("a variable was iterated over")

    for name in ("__getitem__", "__iter__"):
        monkeypatch.setattr(keras.Variable, name, refuse, raising=False)
    return indices


@pytest.mark.parametrize("case", WITHOUT_LIST)
def test_methods_reject_single_variable_or_tensor_without_iterating(
    optimizer, case, iterated, snapshot
):
    variable, method = keras.Variable([1.0, 2.0]), case.split(" ")[0]
    if method in ("ratios", "trust_ratios") and not hasattr(optimizer, method):
        pytest.skip("of LARC, or of LARS and LAMB")
    if method == "stateless_apply" and keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no stateless_apply on TensorFlow")
    if method not in ("build", "apply"):
        optimizer.build([variable])
    before = snapshot([variable, *optimizer.variables])
    with pytest.raises(TypeError, match="must be a list of"):
        WITHOUT_LIST[case](optimizer, variable)
    assert snapshot([variable, *optimizer.variables]) == before
    assert not iterated


def test_get_unscaled_gradients_rejects_single_tensor_without_iterating(iterated):
    optimizer = keras_lso.LossScaleOptimizer(sgd())
    variable = keras.Variable([1.0, 2.0])
    for grads in (variable, variable.value):
        with pytest.raises(TypeError, match="`grads` must be a list of gradients"):
            optimizer.get_unscaled_gradients(grads)
    assert not iterated


@pytest.mark.parametrize("make", [list, tuple, iter], ids=lambda make: make.__name__)
def test_build_accepts_any_iterable_of_variables(optimizer, variables, make):
    optimizer.build(make(variables))
    optimizer.finalize_variable_values(make(variables))
    optimizer.apply(two_gradients(), variables)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("variables", ["dense/kernel", {"w": 1}, 3.0, None, ["dense"]])
def test_build_rejects_arguments_that_are_not_variables(optimizer, variables):
    with pytest.raises(TypeError, match="`variables` (must be a list of|takes) var"):
        optimizer.build(variables)
    assert not optimizer.built


def test_stateless_restore_if_skipped_requires_lists_of_values():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    optimizer = keras_lso.LossScaleOptimizer(sgd())
    optimizer.build(layer.trainable_variables)
    values = [v.value for v in layer.non_trainable_variables]
    pair = values, [v.value for v in optimizer.variables]
    for before in (values[0], (values[0], pair[1]), (values, pair[1][0])):
        with pytest.raises(TypeError, match="`before` must be a list of"):
            keras_lso.stateless_restore_if_skipped(layer, optimizer, before, pair)


def complex_variable():
    return keras.Variable(np.complex64([1 + 2j, 3]), dtype="complex64", name="phase")


def test_complex_variable_is_rejected_by_name_and_stays_unchanged(optimizer, snapshot):
    variable = complex_variable()
    before = snapshot([variable])
    with pytest.raises(ValueError, match="two variables(.|\n)*'phase'.*complex64"):
        optimizer.build([keras.Variable(1.0), variable])
    with pytest.raises(ValueError, match="two variables.*'phase'"):
        optimizer.apply(gradients(np.complex64([1, 1j])), [variable])
    assert not optimizer.built
    assert snapshot([variable]) == before


def test_real_and_imaginary_parts_train_as_complex_error_suggests():
    real, imaginary = (keras.Variable([x], dtype="float32") for x in (3.0, 4.0))
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.25))

    def loss():
        # The code that the message suggests.
        number = ops.cast(real, "complex64") + 1j * ops.cast(imaginary, "complex64")
        return ops.sum(ops.square(ops.abs(number)))

    optimizer.minimize(loss, [real, imaginary])
    parts = [float(ops.convert_to_numpy(v)[0]) for v in (real, imaginary)]
    # A step subtracts half of x. The magnitude is 5, whose root and square may round.
    np.testing.assert_allclose(parts, [1.5, 2.0], rtol=1e-6)


TWICE = {
    "apply": lambda o, a: o.apply([ops.ones(1)] * 2, [a, a]),
    "build": lambda o, a: o.build([a, a]),
    "apply_gradients": lambda o, a: o.apply_gradients([(ops.ones(1), a)] * 2),
}


@pytest.mark.parametrize("use", TWICE.values(), ids=TWICE)
def test_duplicate_variable_is_rejected(use):
    a = keras.Variable(np.ones(1, "float32"), name="a")
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="twice: 'a' and 'a' are the same"):
        use(optimizer, a)
    assert float(a.numpy()[0]) == 1.0 and not optimizer.built


@pytest.mark.skipif(BACKEND == "jax", reason="JAX's arrays are values, not memory")
def test_two_variables_that_share_one_value_are_rejected():
    a, b = (keras.Variable(np.ones(1, "float32"), name=name) for name in "ab")
    b._value = a._value
    with pytest.raises(ValueError, match="'a' and 'b' are the same"):
        keras_lso.LossScaleOptimizer(sgd()).build([a, b])


def test_stateless_apply_updates_variables_that_share_one_value():
    if BACKEND == "tensorflow":
        pytest.skip("TensorFlow has no stateless_apply")
    variables = [keras.Variable(np.ones(1, "float32")) for _ in "ab"]
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    state = [v.value for v in optimizer.variables]
    one = ops.ones(1)
    new, _ = optimizer.stateless_apply(state, [one, one], [one, one], scaled=False)
    assert [float(ops.convert_to_numpy(v)[0]) for v in new] == [0.0, 0.0]


MULTI = {
    "alone": lambda o: keras_lso.LossScaleOptimizer(o, initial_scale=1.0),
    "LARC inside": lambda o: keras_lso.LossScaleOptimizer(
        keras_lso.LARC(o, mode="scale"), initial_scale=1.0
    ),
    "LARC around": lambda o: keras_lso.LARC(
        keras_lso.LossScaleOptimizer(o, initial_scale=1.0), mode="scale"
    ),
    "LARC": lambda o: keras_lso.LARC(o, mode="scale"),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("wrap", MULTI.values(), ids=MULTI)
def test_step_is_rejected_if_multi_optimizer_member_has_no_gradients(
    wrap, dtype, snapshot
):
    names = "body", "head", "head_bias"
    variables = [keras.Variable(np.ones(2), dtype=dtype, name=n) for n in names]
    body, head = sgd(), keras.optimizers.Adam(0.5, name="of_the_head")
    inner = multi_optimizer(lambda v: head if v.path.startswith("head") else body)
    optimizer = wrap(inner)
    optimizer.scale_loss(1.0)
    one = ops.ones(2)
    # Not each variable of a member needs a gradient.
    optimizer.apply([one, None, one], variables)
    for grads, paths in (
        ([one, None, None], r"\['head', 'head_bias'\]"),
        ([None, one, one], r"\['body'\]"),
    ):
        before = snapshot([*variables, *optimizer.variables])
        for _ in range(2):
            with pytest.raises(ValueError, match=f"a member of the .*{paths}"):
                optimizer.apply(grads, variables)
            assert snapshot([*variables, *optimizer.variables]) == before
        optimizer.apply([one, one, one], variables)
