"""Which gradients and variables `apply` takes, and what it says of the others."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.compat.open_seq2seq import MixedPrecisionOptimizerWrapper
from keras_lso.loss_scales import DynamicLossScale


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


@pytest.fixture
def refused(optimizer, variables, snapshot):
    """`refused(exception, words, *arguments)`: `apply` raises it, nothing changes."""

    def check(exception, words, *arguments):
        before = snapshot([*variables, *optimizer.variables])
        with pytest.raises(exception) as error:
            optimizer.apply(*arguments)
        for word in words:
            assert word in str(error.value)
        assert snapshot([*variables, *optimizer.variables]) == before

    return check


@pytest.mark.parametrize("is_built", [False, True])
def test_gradients_and_variables_that_are_swapped(
    optimizer, variables, refused, is_built
):
    if is_built:
        optimizer.build(variables)
    grads = gradients(np.float32([1, 1]), np.float32(1))
    words = "swapped", "optimizer.apply(grads, trainable_variables)"
    refused(TypeError, words, variables, grads)
    assert optimizer.built is is_built


@pytest.mark.one_backend
def test_pairs_that_are_swapped(optimizer, variables):
    grads = gradients(np.float32([1, 1]), np.float32(1))
    with pytest.raises(TypeError, match="The two are swapped"):
        optimizer.apply_gradients(zip(variables, grads, strict=True))
    assert not optimizer.built


def test_what_is_no_variable(refused, variables):
    grads = gradients(np.float32([1, 1]), np.float32(1))
    words = "`trainable_variables`", "model.trainable_variables", "It holds"
    refused(TypeError, words, grads, [variables[0], ops.array(3.0)])


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "of_grads", [True, False], ids=["grads", "trainable_variables"]
)
def test_one_tensor_in_place_of_a_list(refused, variables, of_grads):
    grads = gradients(np.float32([1, 1]))
    if of_grads:
        refused(TypeError, ["`grads`", "must be a list"], grads[0], variables[:1])
    else:
        words = "`trainable_variables`", "must be a list"
        refused(TypeError, words, grads, variables[0])


def test_a_dict_of_gradients(refused, variables):
    grads = {"a": ops.array([1.0, 1.0]), "b": ops.array(1.0)}
    refused(TypeError, ["`grads`", "must be a list", "dict"], grads, variables)


def test_generators_are_taken(optimizer, variables, snapshot):
    before = snapshot(variables)
    grads = gradients(np.float32([1, 1]), np.float32(1))
    optimizer.apply((g for g in grads), (v for v in variables))
    assert int(optimizer.iterations) == 1
    assert all(a != b for a, b in zip(snapshot(variables), before, strict=True))


def test_complex_gradients(refused, variables):
    grads = gradients(np.complex64([1, 1j]), np.float32(1))
    words = "complex64", "(2,)", "keras.ops.real(gradient)"
    refused(ValueError, words, grads, variables)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "bool"])
@pytest.mark.parametrize("form", [list, np.asarray, ops.convert_to_tensor])
def test_integers_count_as_floats(form, dtype):
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


def test_integers_that_come_sparse(sparse_gradient):
    variable = keras.Variable(np.ones((3, 1), "float32"))
    optimizer = keras_lso.LossScaleOptimizer(sgd(), initial_scale=1.0)
    rows = np.array([[2], [4]], "int32")
    optimizer.apply([sparse_gradient(rows, [0, 2], (3, 1))], [variable])
    assert ops.convert_to_numpy(variable)[:, 0].tolist() == [0.0, 1.0, -1.0]


def test_unscaling_takes_and_refuses_the_same():
    optimizer = keras_lso.LossScaleOptimizer(sgd(), initial_scale=2.0)
    [unscaled] = optimizer.get_unscaled_gradients(gradients(np.int32([1, 3])))
    assert ops.convert_to_numpy(unscaled).tolist() == [0.5, 1.5]
    with pytest.raises(ValueError, match=r"keras\.ops\.real"):
        optimizer.get_unscaled_gradients(gradients(np.complex64([1j])))


def test_a_policy_takes_and_refuses_the_same():
    policy = DynamicLossScale(8.0, increment_period=1)
    assert bool(policy.update(gradients(np.int32([1, 3])))[1])
    assert float(policy()) == 16.0
    with pytest.raises(ValueError, match=r"keras\.ops\.real"):
        policy.update(gradients(np.complex64([1j])))
    assert float(policy()) == 16.0
