"""`keras_lso.compat.v1`: loss scaling as TF1 had it."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer, compat, loss_scales
from keras_lso.compat.v1 import mixed_precision
from keras_lso.compat.v1.mixed_precision import (
    DynamicLossScale,
    FixedLossScale,
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


# --- Names --------------------------------------------------------------------


def test_v1_loss_scales_are_keras_lso_loss_scales():
    for module in (mixed_precision, mixed_precision.experimental):
        for name in ("LossScale", "FixedLossScale", "DynamicLossScale"):
            assert getattr(module, name) is getattr(loss_scales, name)
    assert compat.v1.mixed_precision is mixed_precision
    assert keras_lso.compat is compat


# --- Policies -----------------------------------------------------------------


def test_policies_are_callable_and_round_trip_through_config_and_repr():
    for policy in (FixedLossScale(8), DynamicLossScale(2048, 500, 4.0)):
        again = type(policy).from_config(policy.get_config())
        assert again.get_config() == policy.get_config()
        assert float(again()) == float(policy()) == policy.initial_loss_scale
        assert keras.backend.standardize_dtype(policy().dtype) == "float32"
        assert eval(repr(policy)).get_config() == policy.get_config()


STRUCTURES = {
    "a list": lambda g: [g, array(1.0)],
    "a tuple with None": lambda g: (None, g, None),
    "a dict": lambda g: {"a": [g], "b": {"c": None}},
    "a tensor": lambda g: g,
    "an empty one beside": lambda g: [ops.zeros((0, 3)), g],
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


def test_update_returns_pair_whose_first_item_is_none():
    result = DynamicLossScale().update([array(1.0)])
    assert isinstance(result, tuple) and len(result) == 2
    assert result[0] is None


@pytest.mark.parametrize("grads", [[], None, [None], {}, {"a": [None, ()]}], ids=str)
def test_update_counts_missing_gradients_as_finite(grads):
    policy = DynamicLossScale(8, increment_period=1)
    assert bool(policy.update(grads)[1])
    assert float(policy()) == 16.0


@pytest.mark.parametrize("bad", [False, True])
def test_update_accepts_sparse_gradients(sparse_gradient, bad):
    rows = np.array([[1.0, 2.0], [3.0, np.inf if bad else 4.0]], "float32")
    policy = DynamicLossScale(8)
    grads = {"a": [sparse_gradient(rows, [2, 0], (3, 2)), None]}
    assert bool(policy.update(grads)[1]) is not bad
    assert float(policy()) == (4.0 if bad else 8.0)


def test_fixed_scale_reports_finiteness_and_stays_unchanged():
    policy = FixedLossScale(8)
    assert bool(policy.update([array(1.0)])[1])
    assert not bool(policy.update([array(np.inf)])[1])
    assert float(policy()) == 8.0


class Doubling(mixed_precision.LossScale):
    needs_amax = True

    def step(self, finite, amax=None):
        self.assign_scale(ops.where(amax > 4.0, self.value * 2, self.value))


def test_custom_policy_can_be_updated():
    policy = Doubling(8)
    for last, expected in ((1.0, 8.0), (-5.0, 16.0)):
        assert bool(policy.update({"a": array(0.5, last)})[1])
        assert float(policy()) == expected


def test_unbuilt_policy_works_in_compiled_function():
    policy = DynamicLossScale(8, increment_period=2)
    if BACKEND == "jax":
        pytest.skip("On JAX state is made outside: `policy.build()`")

    def step(g):
        scale = policy()
        return scale, policy.update([g])[1]

    if BACKEND == "tensorflow":
        import tensorflow as tf

        step = tf.function(step)
    seen = [[float(x) for x in step(array(last))] for last in (1.0, np.inf, 1.0, 1.0)]
    assert seen == [[8.0, 1.0], [8.0, 0.0], [4.0, 1.0], [4.0, 1.0]]
    assert float(policy()) == 8.0


def test_policy_can_be_updated_before_optimizer_is_built():
    policy = DynamicLossScale(8)
    optimizer = LossScaleOptimizer(sgd(), loss_scale=policy)
    policy.update([array(np.inf)])
    assert float(optimizer.loss_scale) == 4.0
    w = new_variable()
    optimizer.minimize(lambda: ops.sum(w), [w])
    assert values(w) == [2.5, 3.5]
    assert sum(v is policy.scale for v in optimizer.variables) == 1


def test_loop_with_policy_skips_overflow_and_unscales_gradients(compiled):
    """The loop of TF1's page on LossScale, with a tensor for a condition."""
    policy, w = DynamicLossScale(8), new_variable()
    policy.build()

    def step(g):
        grads = [g / policy()]
        _, should_apply = policy.update(grads)
        w.assign(ops.where(should_apply, w.value - 0.5 * grads[0], w.value))

    run = compiled(step, [w, *policy.variables])
    for g in (array(8.0, 16.0), array(np.inf, 1.0), array(4.0, 4.0)):
        run(g)
    assert values(w) == [2.0, 2.5]
    assert float(policy()) == 4.0


# --- The optimizer: compute and apply -----------------------------------------


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


def test_apply_gradients_takes_pairs_as_unscaled():
    optimizer, w = make(), new_variable()
    optimizer.apply_gradients([(array(1.0, 0.0), w)])
    assert values(w) == [2.5, 4.0]
    assert optimizer.apply_gradients([(array(1.0, 0.0), w)]) is optimizer.iterations


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_global_step_may_have_any_dtype(dtype):
    optimizer, w, step = make("dynamic"), new_variable(), new_step(dtype)
    for last in (1.0, np.nan, 1.0):
        optimizer.apply_gradients([(array(1.0, last), w)], step, "train")
    assert values(step) == 7
    assert float(optimizer.loss_scale) == 2.0**14


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own variables")
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


@pytest.mark.parametrize("wrong", [5, "step", np.array(0)])
def test_global_step_that_is_not_variable_is_rejected(wrong):
    optimizer, w = make(), new_variable()
    with pytest.raises(ValueError, match="`global_step` takes variables only"):
        optimizer.apply_gradients([(array(1.0, 1.0), w)], global_step=wrong)
    assert values(w) == [3.0, 4.0]


def test_rejected_gradients_leave_global_step_unchanged():
    optimizer, w, step = make(), new_variable(), new_step()
    for pairs in ([], [(None, w)]):
        with pytest.raises(ValueError, match="No gradients provided"):
            optimizer.apply_gradients(pairs, global_step=step)
    with pytest.raises(TypeError, match="`grads_and_vars` must be a list of"):
        optimizer.apply_gradients([w.value], global_step=step)
    assert (values(step), values(w)) == (5, [3.0, 4.0])


def test_gradient_may_be_none():
    optimizer, w, unused = make(), new_variable(), new_variable()
    pairs = optimizer.compute_gradients(lambda: ops.sum(w), [w, unused])
    assert [g is None for g, _ in pairs] == [False, True]
    assert [v for _, v in pairs][1] is unused
    optimizer.apply_gradients(pairs)
    assert (values(w), values(unused)) == ([2.5, 3.5], [3.0, 4.0])


def test_clipped_gradients_are_applied_unchanged():
    optimizer, w = make(), new_variable()
    pairs = optimizer.compute_gradients(lambda: ops.sum(w * w), [w])
    optimizer.apply_gradients([(ops.clip(g, -7.0, 7.0), v) for g, v in pairs])
    assert values(w) == [0.0, 0.5]


def test_compute_gradients_accepts_arguments_of_tf1():
    optimizer, w = make(), new_variable()
    pairs = optimizer.compute_gradients(
        lambda: w * w,
        [w],
        optimizer.GATE_GRAPH,
        2,
        True,
        array(1.0, -1.0),
    )
    assert values(pairs[0][0]) == [6.0, -8.0]
    with pytest.raises(ValueError, match="gate_gradients"):
        optimizer.compute_gradients(lambda: ops.sum(w), [w], gate_gradients=7)


# --- The optimizer: which variables -------------------------------------------


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


def test_loss_without_var_list_may_build_layers():
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    norm = keras.layers.BatchNormalization(momentum=0.5)
    dropout = keras.layers.Dropout(0.5)
    x = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    optimizer = make()

    def loss():
        y = norm(dense(x), training=True)
        return ops.mean(ops.square(dropout(y, training=True) - 1.0))

    optimizer.minimize(loss)
    # The run that finds the variables leaves no trace: the mean of 3 and 7, halved.
    assert values(norm.moving_mean) == [2.5]
    assert int(optimizer.iterations) == 1
    assert len(optimizer.compute_gradients(loss)) == 4


def test_loss_without_var_list_may_create_variables():
    made = []

    def loss():
        if not made:
            made.append(new_variable())
        return ops.sum(made[0])

    make().minimize(loss)
    assert values(made[0]) == [2.5, 3.5]


@pytest.mark.skipif(BACKEND == "jax", reason="There a tensor is refused anyway")
def test_tensor_as_loss_requires_var_list():
    w = new_variable()
    with pytest.raises(ValueError, match="`var_list` must be given"):
        make().compute_gradients(ops.sum(w))


def test_var_list_accepts_only_variables():
    w = new_variable()
    with pytest.raises(ValueError, match="`var_list` takes variables only"):
        make().compute_gradients(lambda: ops.sum(w), [w, 3.0])


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


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Replicas are TensorFlow's")
@pytest.mark.parametrize("method", ["apply", "minimize", "compute", "update"])
def test_cross_replica_context_is_rejected(method):
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        optimizer, w, policy = make(), new_variable(), DynamicLossScale()
        calls = {
            "apply": lambda: optimizer.apply_gradients([(array(1.0, 1.0), w)]),
            "minimize": lambda: optimizer.minimize(lambda: ops.sum(w), var_list=[w]),
            "compute": lambda: optimizer.compute_gradients(lambda: ops.sum(w), [w]),
            "update": lambda: policy.update([array(1.0)]),
        }
        with pytest.raises(RuntimeError, match="cross-replica context"):
            calls[method]()
    assert values(w) == [3.0, 4.0]


# --- The optimizer: the rest --------------------------------------------------


def test_name_and_use_locking_are_kept_as_in_tf1():
    inner = sgd(name="mine")
    optimizer = MixedPrecisionLossScaleOptimizer(inner, 8)
    assert optimizer.name == optimizer.get_name() == "mine"
    assert optimizer.use_locking is False
    optimizer = make(8, use_locking=True, name="other")
    assert (optimizer.get_name(), optimizer.use_locking) == ("other", True)
    assert optimizer.inner_optimizer.name != "other"


@pytest.mark.parametrize("name", ["", 3, b"a", ["a"], "a/b"])
def test_malformed_name_is_rejected(name):
    with pytest.raises(ValueError, match="`name` must be a non-empty string"):
        make(8, name=name)


@pytest.mark.parametrize(
    "loss_scale, words",
    [
        *[(value, "`loss_scale` must be a number") for value in (None, True, [8])],
        ("static", "name is 'dynamic'. Received: 'static'"),
        *[(value, "must be positive and finite") for value in (0, -1)],
        ({}, "keys 'class_name' and 'config'"),
    ],
)
def test_malformed_loss_scale_is_rejected(loss_scale, words):
    with pytest.raises(ValueError, match=words):
        make(loss_scale)


def test_any_policy_may_be_loss_scale():
    for policy in (FixedLossScale(8), DynamicLossScale(8, multiplier=4), Doubling(8)):
        optimizer = make(policy)
        assert optimizer.loss_scale_policy is policy
        assert ops.is_tensor(optimizer.loss_scale)
        assert float(optimizer.loss_scale) == 8.0


@pytest.mark.parametrize("opt", [None, "sgd", keras.optimizers.SGD])
def test_opt_that_is_not_optimizer_is_rejected(opt):
    with pytest.raises(ValueError, match="Argument `opt` must be an instance"):
        MixedPrecisionLossScaleOptimizer(opt, 8)


def test_opt_that_scales_loss_is_rejected():
    with pytest.raises(TypeError, match="`opt` must not be a LossScaleOptimizer"):
        MixedPrecisionLossScaleOptimizer(LossScaleOptimizer(sgd()), 8)


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


def test_v1_optimizer_round_trips_through_config_and_file(tmp_path):
    optimizer = make(64, use_locking=True, name="mine")
    config = keras.optimizers.serialize(optimizer)
    for again in (keras_lso.deserialize(config), keras.optimizers.deserialize(config)):
        assert type(again) is MixedPrecisionLossScaleOptimizer
        assert again.get_config() == optimizer.get_config()
        assert (again.name, again.use_locking) == ("mine", True)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=3, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = keras_lso.load_model(path).optimizer
    assert type(loaded) is MixedPrecisionLossScaleOptimizer
    assert int(loaded.iterations) == 3
    assert float(loaded.loss_scale) == 64.0
