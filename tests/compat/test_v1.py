"""`keras_lso.compat.v1`: loss scaling with the names of TF1."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.compat.v1.mixed_precision import (
    DynamicLossScale,
    MixedPrecisionLossScaleOptimizer,
)

BACKEND = keras.backend.backend()
SCALE = 1024.0


def sgd(**arguments):
    return keras.optimizers.SGD(0.5, **arguments)


def make(loss_scale=SCALE, **arguments):
    return MixedPrecisionLossScaleOptimizer(sgd(), loss_scale, **arguments)


def new_variable():
    return keras.Variable([3.0, 4.0])


def new_step(dtype="int32"):
    return keras.Variable(5, trainable=False, dtype=dtype)


def values(variable):
    return np.array(ops.convert_to_numpy(variable)).tolist()


def array(*values):
    return ops.convert_to_tensor(np.array(values, "float32"))


STRUCTURES = {
    "a list": lambda g: [g, array(1.0)],
    "a dict": lambda g: {"a": [g], "b": {"c": None}},
    "float16": lambda g: [ops.cast(g, "float16"), array(1.0)],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", STRUCTURES)
def test_update_checks_gradients_in_any_structure(kind, compiled):
    policy = DynamicLossScale(8, increment_period=2)
    policy.build()
    run = compiled(
        lambda g: policy.update(STRUCTURES[kind](g))[1], list(policy.variables)
    )
    seen = []
    for last in [1.0, 1.0, np.inf, 1.0, np.nan, -np.inf]:
        should_apply = run(array(1.0, last))
        assert ops.is_tensor(should_apply) and tuple(should_apply.shape) == ()
        seen.append((bool(should_apply), float(policy())))
    assert seen == [
        (True, 8.0),
        (True, 16.0),
        (False, 8.0),
        (True, 8.0),
        (False, 4.0),
        (False, 2.0),
    ]


@pytest.mark.parametrize("grads", [[], {"a": [None, ()]}], ids=str)
def test_update_counts_missing_gradients_as_finite(grads):
    policy = DynamicLossScale(8, increment_period=1)
    nothing, should_apply = policy.update(grads)
    assert nothing is None and bool(should_apply)
    assert float(policy()) == 16.0


def test_compute_gradients_unscales_and_apply_gradients_applies(compiled):
    optimizer, w, step = make(), new_variable(), new_step()
    optimizer.build([w])

    def train(x):
        pairs = optimizer.compute_gradients(lambda: ops.sum(w * w) * x / 2, [w])
        assert len(pairs) == 1 and pairs[0][1] is w
        optimizer.apply_gradients(pairs, global_step=step)
        return pairs[0][0]

    run = compiled(train, [w, step, *optimizer.variables])
    assert values(run(array(1.0)[0])) == [3.0, 4.0]
    assert (values(w), values(step)) == ([1.5, 2.0], 6)
    run(array(np.inf)[0])
    assert (values(w), values(step)) == ([1.5, 2.0], 6)
    run(array(1.0)[0])
    assert (values(w), values(step)) == ([0.75, 1.0], 7)
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (2, 1)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow has variables")
def test_global_step_and_variables_may_be_tensorflow_variables():
    import tensorflow as tf

    optimizer, w = make(), tf.Variable([3.0, 4.0])
    step = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def train():
        pairs = optimizer.compute_gradients(tf.reduce_sum(w * w) / 2, [w])
        return optimizer.apply_gradients(pairs, global_step=step)

    train()
    assert (w.numpy().tolist(), int(step)) == ([1.5, 2.0], 1)


def test_compute_gradients_accepts_arguments_of_tf1():
    optimizer, w = make(), new_variable()
    pairs = optimizer.compute_gradients(
        lambda: w * w, [w], optimizer.GATE_GRAPH, 2, True, array(1.0, -1.0)
    )
    assert values(pairs[0][0]) == [6.0, -8.0]
    with pytest.raises(ValueError, match="gate_gradients"):
        optimizer.compute_gradients(lambda: ops.sum(w), [w], gate_gradients=7)


def test_loss_without_var_list_trains_all_variables_read():
    w, b, other = new_variable(), keras.Variable(2.0), new_variable()
    frozen = keras.Variable(1.0, trainable=False)
    optimizer = make()
    pairs = optimizer.compute_gradients(lambda: ops.sum(w * w) * b * frozen)
    assert [v for _, v in pairs][0] is w and [v for _, v in pairs][1] is b
    assert len(pairs) == 2
    optimizer.minimize(lambda: ops.sum(w) + b)
    assert (values(w), values(b)) == ([2.5, 3.5], 1.5)
    assert values(other) == [3.0, 4.0]


def test_optimizer_without_var_list_uses_variables_from_build():
    w, unused = new_variable(), new_variable()
    optimizer = make()
    optimizer.build([unused, w])
    pairs = optimizer.compute_gradients(lambda: ops.sum(w))
    assert [g is None for g, _ in pairs] == [True, False]


@pytest.mark.skipif(BACKEND == "jax", reason="JAX takes no tensor as a loss")
def test_tensor_as_loss_requires_var_list():
    w = new_variable()
    with pytest.raises(ValueError, match="`var_list` must be given"):
        make().compute_gradients(ops.sum(w))


def test_minimize_computes_and_applies_with_arguments_of_tf1():
    optimizer, w, step = make(), new_variable(), new_step()
    optimizer.minimize(lambda: ops.sum(w * w) / 2, step, [w])
    assert (values(w), values(step)) == ([1.5, 2.0], 6)
    optimizer.minimize(
        lambda: w * w / 2,
        global_step=step,
        var_list=[w],
        gate_gradients=0,
        aggregation_method=None,
        colocate_gradients_with_ops=True,
        name="train",
        grad_loss=array(1.0, 0.0),
    )
    assert (values(w), values(step)) == ([0.75, 2.0], 7)
    optimizer.minimize(lambda: ops.sum(w) * np.float32(np.nan), step, [w])
    assert (values(w), values(step)) == ([0.75, 2.0], 7)


def test_name_and_use_locking_are_kept_as_in_tf1():
    inner = sgd(name="mine")
    optimizer = MixedPrecisionLossScaleOptimizer(inner, 8)
    assert optimizer.name == optimizer.get_name() == "mine"
    assert optimizer.use_locking is False
    optimizer = make(8, use_locking=True, name="other")
    assert (optimizer.get_name(), optimizer.use_locking) == ("other", True)
    assert optimizer.inner_optimizer.name != "other"


def test_variables_are_iteration_slots_and_loss_scale():
    optimizer = MixedPrecisionLossScaleOptimizer(sgd(momentum=0.5), "dynamic")
    w = keras.Variable([3.0, 4.0], name="w")
    optimizer.minimize(lambda: ops.sum(w), var_list=[w])
    names = [v.name for v in optimizer.variables()]
    assert names[0] == "iteration"
    assert sorted(names[1:]) == ["dynamic_scale", "step_counter", "w_momentum"]
    assert {id(v) for v in optimizer.variables()} <= {
        id(v) for v in optimizer.variables
    }
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_slot(w, "m") is None
    assert values(optimizer.get_slot(w, "momentum")) == [-0.5, -0.5]


def test_v1_optimizer_round_trips_through_config():
    optimizer = make(64, use_locking=True, name="mine")
    config = keras.optimizers.serialize(optimizer)
    for again in (keras_lso.deserialize(config), keras.optimizers.deserialize(config)):
        assert type(again) is MixedPrecisionLossScaleOptimizer
        assert again.get_config() == optimizer.get_config()
        assert (again.name, again.use_locking) == ("mine", True)


def test_opt_that_is_no_optimizer_of_keras_is_a_value_error_as_in_tf1():
    with pytest.raises(ValueError, match="`opt` must be an instance of"):
        MixedPrecisionLossScaleOptimizer("sgd", "dynamic")
