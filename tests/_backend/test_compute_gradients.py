"""`compute_gradients` and `differentiate` against derivatives by hand."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend import backend
from testing.primitives import REFERENCE
from testing.tensors import number, numpy, tensor


def test_gradients_equal_hand_computed_derivatives(compiled):
    a, b = keras.Variable([[1.0, -2.0]]), keras.Variable(3.0)
    unused = keras.Variable([5.0, 6.0])
    variables = [a, b, unused]

    def loss():
        return ops.sum(ops.square(a)) * b + 2.0 * b

    def compute():
        # A compiled function cannot return None where it returns tensors.
        value, gradients = backend.host.compute_gradients(loss, variables)
        assert len(gradients) == 3
        of_unused = gradients[2]
        if of_unused is None:
            of_unused = ops.zeros(2)
        return value, gradients[0], gradients[1], of_unused

    # (1 + 4) * 3 + 2 * 3; 2 * a * b; (1 + 4) + 2.
    expected = [21.0, [[6.0, -12.0]], 7.0, [0.0, 0.0]]
    for actual, by_hand in zip(compiled(compute, variables)(), expected, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(actual), by_hand)


def test_compute_gradients_changes_no_variable(snapshot):
    variables = [keras.Variable([1.0, -0.0]), keras.Variable(2.0)]
    before = snapshot(variables)
    backend.host.compute_gradients(
        lambda: ops.sum(variables[0] * variables[1]), variables
    )
    assert snapshot(variables) == before


def test_compute_gradients_without_framework_says_how_to_choose_backend():
    with pytest.raises(NotImplementedError, match="set KERAS_BACKEND to") as error:
        REFERENCE.host.compute_gradients(lambda: 1.0, [])
    for framework in ("tensorflow", "jax", "torch"):
        assert repr(framework) in str(error.value)


@pytest.mark.parametrize("weights", [[1.0, -2.0], np.array([1.0, -2.0]), None])
def test_weights_scale_gradients_of_loss_elements(weights):
    a = keras.Variable([3.0, 4.0])
    loss, [gradient] = backend.host.compute_gradients(lambda: a * a, [a], weights)
    np.testing.assert_array_equal(ops.convert_to_numpy(loss), [9.0, 16.0])
    by_hand = [6.0, 8.0] if weights is None else [6.0, -16.0]
    np.testing.assert_array_equal(ops.convert_to_numpy(gradient), by_hand)


def test_scalar_weight_applies_to_all_loss_elements():
    a = keras.Variable(3.0)
    _, [gradient] = backend.host.compute_gradients(lambda: a + ops.zeros(4), [a], 2.0)
    assert number(gradient) == 8.0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_are_cast_to_dtype_of_loss(dtype):
    a = keras.Variable([3.0, 4.0], dtype=dtype)
    _, [gradient] = backend.host.compute_gradients(
        lambda: a * a, [a], tensor([1.0, 0.5], "float32")
    )
    assert keras.backend.standardize_dtype(gradient.dtype) == dtype
    np.testing.assert_array_equal(numpy(gradient), [6.0, 4.0])


def test_variable_unused_by_loss_has_gradient_none():
    a, b = keras.Variable(2.0), keras.Variable(3.0)
    for variables in ([a, b], lambda: [a, b]):
        _, gradients = backend.host.compute_gradients(lambda: a * a, variables)
        assert gradients[1] is None
        assert number(gradients[0]) == 4.0
    loss, gradients = backend.host.compute_gradients(lambda: 5.0, [a, b])
    assert gradients == [None, None]
    assert number(loss) == 5.0


def test_loss_may_hold_weight_regularizers_of_other_variables():
    layers = [keras.layers.Dense(1, kernel_regularizer="l2") for _ in "ab"]
    model = keras.Sequential([keras.Input((2,)), *layers])
    second, bias = layers[1].trainable_variables

    def loss():
        return ops.sum(model(ops.zeros((3, 2)))) + sum(model.losses)

    _, gradients = backend.host.compute_gradients(loss, [second, bias])
    # Of 0.01 times the square, and of the sum of three outputs.
    np.testing.assert_allclose(numpy(gradients[0]), 0.02 * second.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(numpy(gradients[1]), [3.0])
    read = backend.host.trained_variables(loss)
    assert set(map(id, read)) == set(map(id, model.trainable_variables))


def test_empty_variable_list_returns_no_gradients():
    a = keras.Variable(2.0)
    loss, gradients = backend.host.compute_gradients(lambda: a * a, [])
    assert list(gradients) == []
    assert number(loss) == 4.0


def test_non_trainable_variable_has_gradient_and_stays_frozen():
    frozen = keras.Variable(3.0, trainable=False)
    _, [gradient] = backend.host.compute_gradients(lambda: frozen * frozen, [frozen])
    assert number(gradient) == 6.0
    # It is not followed from then on.
    _, gradients = backend.host.compute_gradients(lambda: frozen * frozen, [frozen])
    assert number(gradients[0]) == 6.0
    assert not frozen.trainable


def test_assignments_made_by_loss_persist(compiled):
    a, count = keras.Variable(2.0), keras.Variable(0.0, trainable=False)
    average = keras.Variable([0.0, 0.0], trainable=False)

    def loss(x):
        count.assign_add(1.0)
        new = 0.5 * average + 0.5 * a * x
        average.assign(new)
        count.assign_add(10.0)
        return ops.sum(new) * count

    run = compiled(
        lambda x: backend.host.compute_gradients(lambda: loss(x), [a])[1][0],
        [a, count, average],
    )
    # d/da of 11 * sum(a * x / 2).
    assert number(run(tensor([1.0, 3.0]))) == 22.0
    assert number(count.value) == 11.0
    np.testing.assert_array_equal(average.numpy(), [1.0, 3.0])
    # The average is a number by now: d/da of 22 * sum(old / 2 + a * x / 2).
    assert number(run(tensor([1.0, 3.0]))) == 44.0
    np.testing.assert_array_equal(average.numpy(), [1.5, 4.5])


def test_variables_may_be_created_by_loss():
    made = []

    def loss():
        if not made:
            made.append(keras.layers.Dense(1, kernel_initializer="ones"))
        return ops.sum(made[0](np.array([[1.0, 2.0]], "float32")))

    loss, gradients = backend.host.compute_gradients(
        loss, lambda: made[0].trainable_variables
    )
    assert number(loss) == 3.0
    np.testing.assert_array_equal(numpy(gradients[0]), [[1.0], [2.0]])
    np.testing.assert_array_equal(numpy(gradients[1]), [1.0])


def differentiated(a, power, **arguments):
    """The gradient of `sum(a ** 2) * 3`, from the tensor `a ** 2`."""
    variables = [a, keras.Variable(1.0)]
    transform = lambda loss: loss * 3.0  # noqa: E731
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = power()
        arguments["tape"] = tape
    else:
        loss = power()
    return backend.host.differentiate(loss, variables, transform, **arguments)


@pytest.mark.parametrize(
    "grad_loss, expected", [(None, [18, 24]), ([1, -1], [18, -24])]
)
def test_differentiate_returns_gradient_of_tensor_except_on_jax(grad_loss, expected):
    a = keras.Variable([3.0, 4.0])
    if keras.backend.backend() == "jax":
        with pytest.raises(ValueError, match="does not know how it was computed"):
            differentiated(a, lambda: a * a, grad_loss=grad_loss)
        return
    gradient, of_unused = differentiated(a, lambda: a * a, grad_loss=grad_loss)
    np.testing.assert_array_equal(numpy(gradient), expected)
    assert of_unused is None


def test_tape_is_rejected_on_backends_without_tapes():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("There are tapes")
    with pytest.raises(ValueError, match="`tape` is TensorFlow's"):
        backend.host.differentiate(ops.ones(()), [], lambda loss: loss, tape=object())


def test_differentiate_without_framework_raises_not_implemented_error():
    with pytest.raises(NotImplementedError, match="set KERAS_BACKEND to"):
        REFERENCE.host.differentiate(1.0, [], lambda loss: loss)
