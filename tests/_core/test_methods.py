"""The methods of tf.keras that compute gradients and apply pairs of them."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARS, LossScaleOptimizer
from keras_lso.mixed_precision import experimental

BACKEND = keras.backend.backend()
SCALE = 1024.0
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch only")


def sgd():
    return keras.optimizers.SGD(0.5)


# All three take the steps of plain SGD at a rate of 0.5. Scales and rates are powers
# of two, so that the results are exact.
MAKERS = {
    "modern": lambda: LossScaleOptimizer(sgd(), initial_scale=SCALE),
    "experimental": lambda: experimental.LossScaleOptimizer(sgd(), SCALE),
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


def check_values(*pairs):
    for variable, expected in pairs:
        assert values(variable) == expected


@pytest.mark.exhaustive
def test_minimize_takes_step_of_unscaled_loss(optimizer, compiled):
    w, b, calls = new_variable(), keras.Variable(2.0), keras.Variable(0.0)
    optimizer.build([w, b])

    def loss(x):
        # It runs once in a step, and other variables are not trained.
        calls.assign_add(1.0)
        return ops.sum(w * w) * x / 2 + b * calls

    def step(x):  # `jax.jit` returns no variable.
        optimizer.minimize(lambda: loss(x), [w, b])

    run = compiled(step, [w, b, calls, *optimizer.variables])
    run(array(1.0))
    check_values((w, [1.5, 2.0]), (b, 1.5), (calls, 1.0))
    run(array(-1.0))
    check_values((w, [2.25, 3.0]), (b, 0.5), (calls, 2.0))
    assert int(optimizer.iterations) == 2
    if isinstance(optimizer, LARS):  # It skips no step.
        return
    run(array(np.inf))
    check_values((w, [2.25, 3.0]), (b, 0.5))
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (2, 1)
    run(array(1.0))
    check_values((w, [1.125, 1.5]), (b, -1.5))
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (3, 1)


def test_var_list_may_be_structure_variable_or_callable(optimizer):
    w, unused = new_variable(), new_variable()
    optimizer.build([w, unused])
    # A variable without a gradient stays as it is.
    for n, var_list in enumerate(
        ([w, unused], {"a": [w], "b": ()}, w, lambda: (w,)), start=1
    ):
        optimizer.minimize(lambda: ops.sum(w), var_list)
        check_values((w, [3.0 - n / 2, 4.0 - n / 2]), (unused, [3.0, 4.0]))


def test_grad_loss_weights_elements_of_loss(optimizer):
    w = new_variable()
    optimizer.minimize(lambda: w * w / 2, [w], grad_loss=[1.0, -2.0])
    assert values(w) == [1.5, 8.0]


@on_tensorflow
@pytest.mark.parametrize("make", ["keras", "tensorflow"])
def test_minimize_accepts_tensor_or_callable_with_its_tape(optimizer, make):
    import tensorflow as tf

    w = new_variable() if make == "keras" else tf.Variable([3.0, 4.0])
    optimizer.minimize(lambda: tf.reduce_sum(w * w) / 2, [w])
    assert values(w) == [1.5, 2.0]
    with tf.GradientTape(persistent=True) as tape:
        loss = w * 1.0
        squares = w * w
    optimizer.minimize(loss, lambda: [w], tape=tape, grad_loss=[1.0, -2.0])
    assert values(w) == [1.0, 3.0]
    # A callable may use what the tape has recorded.
    optimizer.minimize(lambda: tf.reduce_sum(squares) / 2, [w], tape=tape)
    assert values(w) == [0.25, 2.0]


@pytest.mark.skipif(BACKEND == "torch", reason="Its tensors have a history")
def test_error_for_tensor_as_loss_says_what_to_write(optimizer):
    words = {
        "tensorflow": "`tape` is required.*GradientTape",
        "jax": "does not know how it was computed.*`lambda",
    }[BACKEND]
    w = new_variable()
    with pytest.raises(ValueError, match=words):
        optimizer.minimize(ops.sum(w * w), [w])
    assert values(w) == [3.0, 4.0]


@on_torch
def test_methods_accept_tensor_on_pytorch(optimizer):
    import torch

    w = new_variable()
    loss = w * w / 2
    with torch.no_grad():
        optimizer.minimize(loss, [w], grad_loss=[1.0, -2.0])
    assert values(w) == [1.5, 8.0]
    assert values(optimizer.get_gradients(ops.sum(w * w), [w])[0]) == [3.0, 16.0]


def test_minimize_rejects_invalid_arguments(optimizer):
    w, other = new_variable(), new_variable()
    for loss, var_list, grad_loss, words in (
        (lambda: ops.sum(w), [w, None], None, "`var_list` takes variables only"),
        (lambda: ops.sum(w), lambda: [w, "w"], None, "`var_list` takes variables onl"),
        (lambda: ops.sum(w), [w, w], None, "`var_list` holds a variable twice"),
        (lambda: ops.sum(w), [], None, "No gradients provided for any variable"),
        (lambda: ops.sum(other), [w], None, "No gradients provided for any variable"),
        (lambda: w * w, [w], np.ones(3, "float32"), "`grad_loss` must have the loss's"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.minimize(loss, var_list, grad_loss=grad_loss)
        assert values(w) == [3.0, 4.0]
        assert not optimizer.built


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


def test_get_updates_takes_step(optimizer):
    w = new_variable()
    result = optimizer.get_updates(lambda: ops.sum(w * w) / 2, [w])
    assert values(w) == [1.5, 2.0]
    assert len(result) == 1 and result[0] is optimizer.iterations


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow has tapes")
def test_tape_with_callable_is_rejected_on_other_backends(optimizer):
    w = new_variable()
    with pytest.raises(ValueError, match="A `tape` is TensorFlow's"):
        optimizer.minimize(lambda: ops.sum(w), [w], tape=object())
    assert values(w) == [3.0, 4.0]


@pytest.mark.parametrize("name, scale", [("modern", SCALE), ("experimental", 1.0)])
def test_class_decides_if_pairs_are_scaled_before_any_scaling(name, scale):
    optimizer, w = MAKERS[name](), new_variable()
    optimizer.apply_gradients([(array([scale, -scale]), w)])
    assert values(w) == [2.5, 4.5]
    # `minimize` does not change how the next pairs are applied.
    optimizer.minimize(lambda: ops.sum(w), [w])
    optimizer.apply_gradients([(array([scale, -scale]), w)])
    assert values(w) == [1.5, 4.5]


def test_pairs_are_scaled_after_scale_loss_and_unscaled_after_unscaling(scaling):
    # Keras 3's TensorFlow trainer calls these two.
    w = new_variable()
    scaling.scale_loss(1.0)
    scaling.apply_gradients([(array([SCALE, 0.0]), w)])
    assert values(w) == [2.5, 4.0]
    scaling.get_unscaled_gradients([None])
    scaling.apply_gradients([(array([1.0, 0.0]), w)])
    assert values(w) == [2.0, 4.0]
    # tf.keras calls these.
    scaling.get_scaled_loss(1.0)
    grads = scaling.get_unscaled_gradients([array([SCALE, 0.0]), None])
    assert values(grads[0]) == [1.0, 0.0] and grads[1] is None
    for _ in range(2):
        scaling.apply_gradients([(grads[0], w)])
    assert values(w) == [1.0, 4.0]
    # An argument overrides them.
    scaling.apply_gradients([(array([SCALE, 0.0]), w)], scaled=True)
    scaling.get_scaled_loss(1.0)
    scaling.apply_gradients([(array([1.0, 0.0]), w)], scaled=False)
    assert values(w) == [0.0, 4.0]


def make_step(optimizer, w, **arguments):
    scale = SCALE if type(optimizer) is LossScaleOptimizer else 1.0
    return optimizer.apply_gradients([(array([scale, 0.0]), w)], **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "train", "experimental_aggregate_gradients": False},
        {"skip_gradients_aggregation": True},
    ],
    ids=str,
)
def test_aggregation_arguments_change_nothing_with_one_replica(optimizer, arguments):
    w = new_variable()
    for n, more in enumerate((arguments, arguments, {}), start=1):
        assert make_step(optimizer, w, **more) is optimizer.iterations
        assert values(w) == [3.0 - n / 2, 4.0]


MALFORMED = {
    "none": lambda w: None,
    "a variable": lambda w: w,
    "a gradient": lambda w: [array([1.0, 1.0])],
    "three items": lambda w: [(array([1.0, 1.0]), w, w)],
    "swapped": lambda w: [(w, array([1.0, 1.0]))],
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_pairs_raise_type_error(optimizer, kind):
    w = new_variable()
    words = "The two are swapped" if kind == "swapped" else "grads_and_vars"
    with pytest.raises(TypeError, match=words):
        optimizer.apply_gradients(MALFORMED[kind](w))
    for pairs in ([], [(None, w)]):
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            optimizer.apply_gradients(pairs)
    make_step(optimizer, w)
    assert values(w) == [2.5, 4.0]


@on_tensorflow
def test_cross_replica_context_is_rejected(optimizer):
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        w = new_variable()
        pairs = [(array([1.0, 1.0]), w)]
        calls = [
            lambda: optimizer.minimize(lambda: ops.sum(w), [w]),
            lambda: optimizer.get_updates(lambda: ops.sum(w), [w]),
            lambda: optimizer.apply_gradients(pairs),
            lambda: optimizer.apply_gradients(pairs, skip_gradients_aggregation=True),
        ]
        if not isinstance(optimizer, LARS):  # whose touches no variable
            calls.append(lambda: optimizer.get_gradients(lambda: ops.sum(w), [w]))
        for call in calls:
            with pytest.raises(RuntimeError, match="cross-replica context"):
                call()
    assert values(w) == [3.0, 4.0]
    assert not optimizer.built
