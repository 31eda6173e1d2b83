"""The methods of tf.keras that compute gradients and apply them."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARS, LossScaleOptimizer
from keras_lso.mixed_precision import experimental

BACKEND = keras.backend.backend()
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch only")


def sgd():
    return keras.optimizers.SGD(0.5)


# All three take the steps of plain SGD at a rate of 0.5. Scales and rates are powers
# of two, so that the results are exact.
MAKERS = {
    "modern": lambda: LossScaleOptimizer(sgd(), initial_scale=1024),
    "experimental": lambda: experimental.LossScaleOptimizer(sgd(), 1024),
    "LARS": lambda: LARS(0.5, momentum=0.0, exclude_from_layer_adaptation=[""]),
}


@pytest.fixture(params=MAKERS)
def optimizer(request):
    return MAKERS[request.param]()


@pytest.fixture(params=["modern", "experimental"])
def scaling(request):
    return MAKERS[request.param]()


def new_variable(value=(3.0, 4.0), **arguments):
    return keras.Variable(list(value), **arguments)


def values(variable):
    return np.array(ops.convert_to_numpy(variable)).tolist()


def array(values):
    return ops.convert_to_tensor(np.array(values, "float32"))


# --- minimize: what it does ---------------------------------------------------


@pytest.mark.exhaustive
def test_minimize_takes_step_of_unscaled_loss(optimizer, compiled):
    w, b = new_variable(), keras.Variable(2.0)
    optimizer.build([w, b])

    def step(x):
        optimizer.minimize(lambda: ops.sum(w * w) * x / 2 + b, [w, b])

    run = compiled(step, [w, b, *optimizer.variables])
    run(array(1.0))
    assert values(w) == [1.5, 2.0]
    assert values(b) == 1.5
    run(array(-1.0))
    assert values(w) == [2.25, 3.0]
    assert values(b) == 1.0
    assert int(optimizer.iterations) == 2


def test_minimize_skips_overflow(scaling, compiled):
    w = new_variable()
    scaling.build([w])

    def step(x):
        scaling.minimize(lambda: ops.sum(w * x), [w])

    run = compiled(step, [w, *scaling.variables])
    run(array(np.inf))
    assert values(w) == [3.0, 4.0]
    assert (int(scaling.iterations), int(scaling.skipped_steps)) == (0, 1)
    run(array(1.0))
    assert values(w) == [2.5, 3.5]
    assert (int(scaling.iterations), int(scaling.skipped_steps)) == (1, 1)


@pytest.mark.parametrize("kind", ["list", "nested", "one", "callable"])
def test_var_list_may_be_structure_variable_or_callable(optimizer, kind):
    w = new_variable()
    var_list = {
        "list": [w],
        "nested": {"a": [w], "b": ()},
        "one": w,
        "callable": lambda: (w,),
    }[kind]
    for expected in ([2.5, 3.5], [2.0, 3.0]):
        optimizer.minimize(lambda: ops.sum(w), var_list)
        assert values(w) == expected


def test_variable_without_gradient_stays_unchanged(optimizer):
    w, unused = new_variable(), new_variable()
    optimizer.build([w, unused])
    optimizer.minimize(lambda: ops.sum(w), [w, unused])
    assert values(w) == [2.5, 3.5]
    assert values(unused) == [3.0, 4.0]


def test_grad_loss_weights_elements_of_loss(optimizer):
    w = new_variable()
    optimizer.minimize(lambda: w * w / 2, [w], grad_loss=[1.0, -2.0])
    assert values(w) == [1.5, 8.0]


# --- minimize: what happens inside the loss -----------------------------------


def test_assignment_in_loss_runs_once_per_step(optimizer, compiled):
    w, calls = new_variable(), keras.Variable(0.0, trainable=False)
    optimizer.build([w])

    def loss():
        calls.assign_add(1.0)
        return ops.sum(w) * calls

    def step():
        optimizer.minimize(loss, [w])

    run = compiled(step, [w, calls, *optimizer.variables])
    run()
    assert values(calls) == 1.0
    assert values(w) == [2.5, 3.5]
    run()
    assert values(calls) == 2.0
    assert values(w) == [1.5, 2.5]


# --- minimize: a tensor -------------------------------------------------------


@on_tensorflow
@pytest.mark.parametrize("persistent", [False, True])
def test_minimize_accepts_tensor_with_its_tape(optimizer, persistent):
    import tensorflow as tf

    w = new_variable()
    with tf.GradientTape(persistent=persistent) as tape:
        loss = w * w / 2
    optimizer.minimize(loss, [w], tape=tape, grad_loss=[1.0, -2.0])
    assert values(w) == [1.5, 8.0]


@on_tensorflow
def test_minimize_accepts_tensorflow_variables(optimizer):
    import tensorflow as tf

    w = tf.Variable([3.0, 4.0])
    optimizer.minimize(lambda: tf.reduce_sum(w * w) / 2, [w])
    assert w.numpy().tolist() == [1.5, 2.0]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w)
    optimizer.minimize(loss, lambda: [w], tape=tape)
    assert w.numpy().tolist() == [1.0, 1.5]


@on_tensorflow
def test_tensor_without_tape_is_rejected_on_tensorflow(optimizer, snapshot):
    w = new_variable()
    with pytest.raises(ValueError, match="`tape` is required.*GradientTape"):
        optimizer.minimize(ops.sum(w * w), [w])
    assert values(w) == [3.0, 4.0]


@on_torch
def test_minimize_accepts_tensor_on_pytorch(optimizer):
    w = new_variable()
    optimizer.minimize(w * w / 2, [w], grad_loss=[1.0, -2.0])
    assert values(w) == [1.5, 8.0]


@on_torch
def test_minimize_accepts_tensor_under_no_grad(optimizer):
    import torch

    w = new_variable()
    loss = ops.sum(w)
    with torch.no_grad():
        optimizer.minimize(loss, [w])
    assert values(w) == [2.5, 3.5]


@pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
def test_error_for_tensor_on_jax_shows_lambda_to_write(optimizer):
    w = new_variable()
    with pytest.raises(ValueError, match="does not know how it was computed.*`lambda"):
        optimizer.minimize(ops.sum(w * w), [w])
    assert values(w) == [3.0, 4.0]


# --- minimize: what it refuses ------------------------------------------------


@pytest.mark.parametrize("wrong", [None, "w"])
def test_var_list_accepts_only_variables(optimizer, wrong):
    w = new_variable()
    for var_list in ([w, wrong], lambda: [w, wrong]):
        with pytest.raises(ValueError, match="`var_list` takes variables only"):
            optimizer.minimize(lambda: ops.sum(w), var_list)
    assert values(w) == [3.0, 4.0]
    assert not optimizer.built


def test_duplicate_variable_in_var_list_is_rejected(optimizer):
    w = new_variable()
    with pytest.raises(ValueError, match="`var_list` holds a variable twice"):
        optimizer.minimize(lambda: ops.sum(w), [w, w])
    assert values(w) == [3.0, 4.0]
    assert not optimizer.built


@pytest.mark.parametrize("depends", [False, True])
def test_minimize_without_any_gradient_raises(optimizer, depends):
    w, other = new_variable(), new_variable()
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        if depends:
            optimizer.minimize(lambda: ops.sum(w), [])
        else:
            optimizer.minimize(lambda: ops.sum(other), [w])
    assert values(w) == [3.0, 4.0]


# --- get_gradients and get_updates --------------------------------------------


def test_get_gradients_returns_unscaled_gradients(optimizer, compiled):
    w, b = new_variable(), keras.Variable(2.0)
    optimizer.build([w, b])
    get = compiled(
        lambda: optimizer.get_gradients(lambda: ops.sum(w * w) * b, [w, b]),
        [w, b, *optimizer.variables],
    )
    of_w, of_b = get()
    assert values(of_w) == [12.0, 16.0]
    assert values(of_b) == 25.0
    assert int(optimizer.iterations) == 0


def test_get_gradients_of_variable_unused_by_loss_raises(optimizer):
    w, unused = new_variable(), keras.Variable(1.0, name="unused")
    with pytest.raises(ValueError, match="unused has `None` for gradient"):
        optimizer.get_gradients(lambda: ops.sum(w), [w, unused])


@on_torch
def test_get_gradients_accepts_tensor_on_pytorch(optimizer):
    w = new_variable()
    assert values(optimizer.get_gradients(ops.sum(w * w), [w])[0]) == [6.0, 8.0]


def test_get_updates_takes_step(optimizer):
    w = new_variable()
    result = optimizer.get_updates(lambda: ops.sum(w * w) / 2, [w])
    assert values(w) == [1.5, 2.0]
    assert len(result) == 1 and result[0] is optimizer.iterations


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a tape is TensorFlow's")
def test_callable_may_use_values_recorded_by_its_tape(optimizer):
    import tensorflow as tf

    w = new_variable()
    with tf.GradientTape() as tape:
        squares = w * w
    optimizer.minimize(lambda: tf.reduce_sum(squares) / 2, [w], tape=tape)
    assert values(w) == [1.5, 2.0]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow has tapes")
def test_tape_with_callable_is_rejected_on_other_backends(optimizer):
    w = new_variable()
    with pytest.raises(ValueError, match="A `tape` is TensorFlow's"):
        optimizer.minimize(lambda: ops.sum(w), [w], tape=object())
    assert values(w) == [3.0, 4.0]


def test_grad_loss_of_different_shape_is_rejected(optimizer):
    w = new_variable()
    with pytest.raises(ValueError, match="`grad_loss` must have the loss's shape"):
        optimizer.minimize(lambda: w * w, [w], grad_loss=np.ones(3, "float32"))
    assert values(w) == [3.0, 4.0]
