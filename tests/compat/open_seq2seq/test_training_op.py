"""The training op in unusual calls."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.compat.open_seq2seq import optimize_loss
from testing.trained_optimizers import saved

BACKEND = keras.backend.backend()


def make(loss, optimizer="SGD", params=None, rate=0.5, **arguments):
    decay_fn = None if rate is None else lambda step: rate
    return optimize_loss(loss, optimizer, params, decay_fn, **arguments)


def variable(*values):
    return keras.Variable(np.array(values or [0.0], "float32"))


ONE = np.float32([1.0])


def test_batches_of_two_kinds_accumulate_for_two_variables():
    a, c = variable(), variable()

    def loss(batch):
        return ops.sum(a * batch["a"]) if "a" in batch else ops.sum(c * batch["c"])

    train_op = make(loss, var_list=[a, c], iter_size=2)
    for kind in "aaca":
        train_op({kind: ONE})
    assert float(a.numpy()[0]) == -0.75
    assert float(c.numpy()[0]) == -0.25


@pytest.mark.skipif(BACKEND != "jax", reason="jax.jit needs JAX")
def test_training_op_in_jax_jit_of_caller_is_rejected():
    import jax

    w = variable()
    train_op = make(lambda x: ops.sum(w * x), var_list=[w])
    with pytest.raises(RuntimeError, match=r"outside `jax\.jit`"):
        jax.jit(lambda x: train_op(x))(ops.ones(1))
    train_op(ONE)
    assert float(w.numpy()[0]) == -0.5


@pytest.mark.skipif(BACKEND != "jax", reason="buffers are donated on JAX")
def test_training_op_donates_no_buffer_that_is_used_elsewhere():
    w, twin, teacher = variable(), variable(), variable(2.0)
    twin.assign(w)
    read = teacher.value
    train_op = make(lambda x: ops.sum((w + twin) * x * teacher), var_list=[w, twin])
    train_op(ops.ones(1))
    # A batch that is the variable's own value.
    train_op(w.value)
    assert float(read[0]) == 2.0
    assert float(w.numpy()[0]) == float(twin.numpy()[0]) == -1.0 + 1.0


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (
            lambda: keras_lso.LossScaleOptimizer(keras.optimizers.SGD(9.0)),
            "the loss would be scaled twice",
        ),
        (lambda: built_for_others(keras.optimizers.SGD(9.0)), "Unknown variable"),
    ],
)
def test_rejected_call_leaves_optimizer_instance_unchanged(optimizer, words):
    optimizer = optimizer()
    with pytest.raises((TypeError, ValueError), match=words):
        make(lambda: ops.zeros(()), optimizer, dtype="mixed", var_list=[variable()])
    assert float(optimizer.learning_rate) == 9.0


def built_for_others(optimizer):
    optimizer.build([variable()])
    return optimizer


def test_second_schedule_for_optimizer_instance_is_rejected():
    optimizer, w = keras.optimizers.SGD(9.0), variable()
    make(lambda: ops.sum(w), optimizer)
    with pytest.raises(ValueError, match="another training op gave it"):
        make(lambda: ops.sum(w), optimizer, rate=0.1)
    make(lambda: ops.sum(w), optimizer, rate=None)()
    assert float(w.numpy()[0]) == -0.5


def test_summaries_are_written_to_last_directory(tmp_path):
    w = variable()
    train_op = make(lambda x: ops.sum(w * x))
    for folder in (tmp_path / "first", tmp_path / "second"):
        train_op.write_summaries(folder, every=1)
        train_op(ONE)
    assert [len(list(folder.iterdir())) for folder in tmp_path.iterdir()] == [1, 1]
    with pytest.raises(ValueError, match="every call updates"):
        train_op(ONE, skip_update=True)
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        train_op.optimizer.get_config()


@pytest.mark.parametrize("knows_model", [True, False])
def test_resumed_rmsprop_matches_uninterrupted_run(knows_model):
    """Its averages start at 1, but not after a file was loaded."""

    def new():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        if knows_model:
            model.build((None, 1))
        train_op = make(
            lambda x: ops.sum(model(x)), "RMSProp", {"momentum": 0.5}, 0.1, model=model
        )
        return model, train_op

    x = np.float32([[3.0]])
    model, whole = new()
    whole(x)
    store = saved(whole.optimizer)
    weights = model.get_weights()
    whole(x)

    resumed_model, resumed = new()
    resumed_model.build((None, 1))
    resumed.optimizer.build(resumed_model.trainable_variables)
    resumed.optimizer.load_own_variables(store)
    resumed_model.set_weights(weights)
    resumed(x)
    for ours, expected in zip(
        resumed_model.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)
