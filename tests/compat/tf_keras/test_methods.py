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


class Network:
    """Layers that write while they are called, and are built when first called."""

    def __init__(self):
        self.dense = keras.layers.Dense(3)
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.dropout = keras.layers.Dropout(0.5, seed=1)
        self.x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
        self.calls = 0

    def loss(self):
        self.calls += 1
        y = self.norm(self.dense(self.x), training=True)
        y = self.dropout(y, training=True)
        return ops.mean(ops.square(y - 1.0))

    def variables(self):
        return self.dense.trainable_variables + self.norm.trainable_variables


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


def test_minimize_updates_dynamic_scale():
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8, dynamic_growth_steps=2)
    w = new_variable()
    scales = []
    for factor in [1.0, 1.0, np.nan, 1.0]:
        optimizer.minimize(lambda x=factor: ops.sum(w) * x, [w])
        scales.append(float(optimizer.loss_scale))
    assert scales == [8.0, 16.0, 8.0, 8.0]


def test_minimize_returns_iterations(optimizer):
    w = new_variable()
    assert optimizer.minimize(lambda: ops.sum(w), [w]) is optimizer.iterations


@pytest.mark.parametrize("kind", ["list", "tuple", "nested", "one", "callable"])
def test_var_list_may_be_structure_variable_or_callable(optimizer, kind):
    w = new_variable()
    var_list = {
        "list": [w],
        "tuple": (w,),
        "nested": {"a": [w], "b": ()},
        "one": w,
        "callable": lambda: (w,),
    }[kind]
    for expected in ([2.5, 3.5], [2.0, 3.0]):
        optimizer.minimize(lambda: ops.sum(w), var_list)
        assert values(w) == expected


def test_minimize_changes_only_variables_in_var_list(optimizer):
    w, other = new_variable(), new_variable()
    optimizer.minimize(lambda: ops.sum(w * other), [w])
    assert values(w) == [1.5, 2.0]
    assert values(other) == [3.0, 4.0]


def test_non_trainable_variable_in_var_list_is_trained(optimizer):
    frozen, w = new_variable(trainable=False), new_variable()
    optimizer.minimize(lambda: ops.sum(frozen) + ops.sum(w), [frozen, w])
    assert values(w) == [2.5, 3.5]
    assert values(frozen) == [2.5, 3.5]


def test_variable_without_gradient_stays_unchanged(optimizer):
    w, unused = new_variable(), new_variable()
    optimizer.build([w, unused])
    optimizer.minimize(lambda: ops.sum(w), [w, unused])
    assert values(w) == [2.5, 3.5]
    assert values(unused) == [3.0, 4.0]


def test_elements_of_loss_are_summed(optimizer):
    w = new_variable()
    optimizer.minimize(lambda: w * w / 2, [w])
    assert values(w) == [1.5, 2.0]


@pytest.mark.parametrize("as_list", [False, True])
def test_grad_loss_weights_elements_of_loss(optimizer, as_list):
    w = new_variable()
    weights = [1.0, -2.0]
    optimizer.minimize(
        lambda: w * w / 2, [w], grad_loss=weights if as_list else array(weights)
    )
    assert values(w) == [1.5, 8.0]


def test_scaled_float16_loss_does_not_overflow(scaling):
    w = new_variable()
    scaling.minimize(lambda: ops.cast(ops.sum(w) * 64, "float16"), [w])
    assert values(w) == [-29.0, -28.0]
    assert int(scaling.skipped_steps) == 0


def test_minimize_steps_float16_variables(scaling):
    w = new_variable(dtype="float16")
    scaling.minimize(lambda: ops.sum(w * w) / 2, [w])
    assert values(w) == [1.5, 2.0]


# --- minimize: what happens inside the loss -----------------------------------


def test_first_call_of_loss_may_build_layers(optimizer):
    dense = keras.layers.Dense(2, kernel_initializer="ones")
    x = np.array([[1.0, 2.0]], "float32")
    for _ in range(2):
        optimizer.minimize(lambda: ops.sum(dense(x)), lambda: dense.trainable_variables)
    assert values(dense.kernel) == [[0.0, 0.0], [-1.0, -1.0]]
    assert values(dense.bias) == [-1.0, -1.0]
    assert int(optimizer.iterations) == 2


def test_first_call_of_loss_may_create_variables(optimizer):
    made = []

    def loss():
        if not made:
            made.append(new_variable())
        return ops.sum(made[0] * made[0]) / 2

    optimizer.minimize(loss, lambda: made)
    assert values(made[0]) == [1.5, 2.0]


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


def test_assignment_in_loss_is_kept_when_step_is_skipped(scaling):
    w, calls = new_variable(), keras.Variable(0.0, trainable=False)

    def loss():
        calls.assign_add(1.0)
        return ops.sum(w) * np.float32(np.inf)

    scaling.minimize(loss, [w])
    assert values(calls) == 1.0
    assert values(w) == [3.0, 4.0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("known", [False, True])
def test_batch_statistics_are_updated_once_per_step(optimizer, known):
    network = Network()
    if known:
        network.loss()
        network.norm.moving_mean.assign(np.zeros(3))
    expected = np.zeros(3)
    for _ in range(3):
        if network.dense.built:
            y = network.x @ np.array(values(network.dense.kernel))
            mean = (y + np.array(values(network.dense.bias))).mean(axis=0)
        var_list = network.variables() if known else network.variables
        optimizer.minimize(network.loss, var_list)
        if expected.any() or known:
            expected = 0.5 * expected + 0.5 * mean
            # Float32 sums of eight products, in another order.
            np.testing.assert_allclose(
                values(network.norm.moving_mean), expected, atol=1e-6
            )
        else:
            expected = np.array(values(network.norm.moving_mean))
            assert expected.any()


def test_dropout_draws_new_mask_at_each_step(optimizer):
    dropout = keras.layers.Dropout(0.5, seed=1)
    w = keras.Variable(np.zeros(64, "float32"))
    steps = []
    for _ in range(3):
        before = np.array(values(w))
        optimizer.minimize(lambda: ops.sum(dropout(w + 1.0, training=True)), [w])
        steps.append(np.array(values(w)) - before)
    # A gradient is 2 where a unit was kept, 0 where it was dropped.
    assert all(set(step) == {0.0, -1.0} for step in steps)
    assert not (steps[0] == steps[1]).all()
    assert not (steps[1] == steps[2]).all()


def test_loss_is_called_once_if_variables_are_known(optimizer):
    network = Network()
    network.loss()
    optimizer.build(network.variables())
    before = network.calls
    optimizer.minimize(network.loss, network.variables)
    optimizer.minimize(network.loss, network.variables())
    assert network.calls == before + 2


def test_failing_loss_leaves_variables_unchanged(optimizer, snapshot):
    w, other = new_variable(), keras.Variable(0.0, trainable=False)
    optimizer.build([w])
    before = snapshot([w, *optimizer.variables])

    def loss():
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        optimizer.minimize(loss, [w])
    assert snapshot([w, *optimizer.variables]) == before
    optimizer.minimize(lambda: ops.sum(w) + other, [w])
    assert values(w) == [2.5, 3.5]


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


@on_torch
def test_minimize_accepts_callable_under_no_grad(optimizer):
    import torch

    w = new_variable()
    with torch.no_grad():
        optimizer.minimize(lambda: ops.sum(w), [w])
    assert values(w) == [2.5, 3.5]


@pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
@pytest.mark.parametrize("method", ["minimize", "get_gradients", "get_updates"])
def test_error_for_tensor_on_jax_shows_lambda_to_write(optimizer, method):
    w = new_variable()
    with pytest.raises(ValueError, match="does not know how it was computed.*`lambda"):
        getattr(optimizer, method)(ops.sum(w * w), [w])
    assert values(w) == [3.0, 4.0]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Tapes are TensorFlow's")
def test_tape_with_tensor_is_rejected_on_other_backends(optimizer):
    w = new_variable()
    with pytest.raises(ValueError, match="`tape` is TensorFlow's"):
        optimizer.minimize(ops.sum(w * w), [w], tape=object())
    assert values(w) == [3.0, 4.0]


# --- minimize: what it refuses ------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 1.0, "w", np.ones(2), [None], {"a": "b"}])
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


def test_constant_loss_raises(optimizer):
    w = new_variable()
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.minimize(lambda: 3.0, [w])


@pytest.mark.parametrize("name", [True, 3, ["a"]])
def test_name_that_is_not_string_is_rejected(optimizer, name):
    w = new_variable()
    with pytest.raises(TypeError, match="`name` must be a string or None"):
        optimizer.minimize(lambda: ops.sum(w), [w], name=name)
    with pytest.raises(TypeError, match="`name` must be a string or None"):
        optimizer.apply_gradients([(array([1.0, 1.0]), w)], name)
    assert values(w) == [3.0, 4.0]
    optimizer.minimize(lambda: ops.sum(w), [w], None, "train")
    assert values(w) == [2.5, 3.5]


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


def test_get_gradients_with_apply_gradients_takes_step(optimizer):
    w = new_variable()
    for expected in ([1.5, 2.0], [0.75, 1.0]):
        grads = optimizer.get_gradients(lambda: ops.sum(w * w) / 2, [w])
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        assert values(w) == expected


def test_get_gradients_of_variable_unused_by_loss_raises(optimizer):
    w, unused = new_variable(), keras.Variable(1.0, name="unused")
    with pytest.raises(ValueError, match="unused has `None` for gradient"):
        optimizer.get_gradients(lambda: ops.sum(w), [w, unused])


@on_tensorflow
def test_get_gradients_accepts_tensor_in_tf_function(optimizer):
    import tensorflow as tf

    w = new_variable()
    get = tf.function(lambda: optimizer.get_gradients(ops.sum(w * w), [w]))
    assert values(get()[0]) == [6.0, 8.0]


@on_torch
def test_get_gradients_accepts_tensor_on_pytorch(optimizer):
    w = new_variable()
    assert values(optimizer.get_gradients(ops.sum(w * w), [w])[0]) == [6.0, 8.0]


@pytest.mark.parametrize("nested", [False, True])
def test_get_updates_takes_step(optimizer, nested):
    w = new_variable()
    params = {"a": w} if nested else [w]
    result = optimizer.get_updates(lambda: ops.sum(w * w) / 2, params)
    assert values(w) == [1.5, 2.0]
    assert len(result) == 1 and result[0] is optimizer.iterations


def test_minimize_unscales_after_earlier_get_gradients(scaling):
    w = new_variable()
    scaling.get_gradients(lambda: ops.sum(w), [w])
    scaling.minimize(lambda: ops.sum(w), [w])
    assert values(w) == [2.5, 3.5]


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


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 2)])
def test_grad_loss_of_different_shape_is_rejected(optimizer, shape):
    w = new_variable()
    with pytest.raises(ValueError, match="`grad_loss` must have the loss's shape"):
        optimizer.minimize(lambda: w * w, [w], grad_loss=np.ones(shape, "float32"))
    assert values(w) == [3.0, 4.0]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.function is TensorFlow's")
def test_grad_loss_weights_loss_of_unknown_length(optimizer):
    import tensorflow as tf

    w = new_variable()
    optimizer.build([w])

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        optimizer.minimize(lambda: w * x, [w], grad_loss=tf.ones_like(x) * 2)

    step(tf.constant([0.5, 1.0]))
    assert values(w) == [2.5, 3.0]
