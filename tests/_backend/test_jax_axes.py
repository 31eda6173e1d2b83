"""`axis_name`: an axis of JAX, over which gradients are averaged before all else."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso

IS_JAX = keras.backend.backend() == "jax"
ON_JAX = pytest.mark.skipif(not IS_JAX, reason="JAX has named axes")


def make(kind):
    inner = keras.optimizers.SGD(0.5)
    return {
        "LossScaleOptimizer": lambda: keras_lso.LossScaleOptimizer(
            inner, initial_scale=2.0
        ),
        "LossScaleOptimizer(LARC)": lambda: keras_lso.LossScaleOptimizer(
            keras_lso.LARC(inner, eta=0.1), initial_scale=2.0
        ),
        "LARC(LossScaleOptimizer)": lambda: keras_lso.LARC(
            keras_lso.LossScaleOptimizer(inner, initial_scale=2.0), eta=0.1
        ),
    }[kind]()


KINDS = ["LossScaleOptimizer", "LossScaleOptimizer(LARC)", "LARC(LossScaleOptimizer)"]


@pytest.mark.skipif(IS_JAX, reason="JAX has named axes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
def test_axis_name_is_rejected_on_backends_other_than_jax(kind, method):
    optimizer, weight = make(kind), keras.Variable([1.0])
    grad = ops.ones((1,))
    arguments = [grad], [weight]
    if method == "apply_gradients":
        arguments = ([(grad, weight)],)
    with pytest.raises(ValueError, match="`axis_name` is an axis of `jax.shard_map`"):
        getattr(optimizer, method)(*arguments, scaled=True, axis_name="batch")
    assert weight.numpy().tolist() == [1.0]


@ON_JAX
@pytest.mark.parametrize("kind", KINDS)
def test_axis_name_outside_mapped_function_raises_value_error(kind):
    optimizer, weight = make(kind), keras.Variable([1.0])
    with pytest.raises(ValueError, match=r"(?s)XLA averages.*axis_name='batch'"):
        optimizer.apply([ops.ones((1,))], [weight], scaled=True, axis_name="batch")


@ON_JAX
def test_axis_name_with_skip_gradients_aggregation_is_rejected():
    optimizer, weight = make("LossScaleOptimizer"), keras.Variable([1.0])
    with pytest.raises(ValueError, match="Give one of them"):
        optimizer.apply_gradients(
            [(ops.ones((1,)), weight)],
            skip_gradients_aggregation=True,
            axis_name="batch",
        )


@pytest.mark.exhaustive
@ON_JAX
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["apply", "apply_gradients", "stateless_apply"])
def test_gradients_are_averaged_over_axis_before_overflow_check(kind, method):
    import jax

    optimizer, weight = make(kind), keras.Variable([4.0, 3.0])
    optimizer.build([weight])
    grads = ops.array([[6.0, 8.0], [0.0, 0.0], [6.0, 8.0], [12.0, 16.0]])
    result = _step_of_four(jax, optimizer, weight, grads, method)
    # The mean is (6, 8), the unscaled one (3, 4) and the step half of it; with LARC
    # (whose epsilon is 1e-7) it is a tenth of |w| = 5 along it.
    step = [1.5, 2.0] if kind == "LossScaleOptimizer" else [0.3, 0.4]
    expected = np.tile(np.array([4.0, 3.0]) - step, (4, 1))
    np.testing.assert_allclose(result, expected, rtol=1e-6)

    grads = grads.at[2, 1].set(np.inf)
    result = _step_of_four(jax, optimizer, weight, grads, method)
    assert result.tolist() == [[4.0, 3.0]] * 4


def _step_of_four(jax, optimizer, weight, grads, method):
    """Returns the weight that each of four participants has after a step."""
    state = [v.value for v in optimizer.variables]

    def step(grad):
        with keras.StatelessScope() as scope:
            if method == "apply":
                optimizer.apply([grad], [weight], scaled=True, axis_name="batch")
            else:
                optimizer.apply_gradients(
                    [(grad, weight)], scaled=True, axis_name="batch"
                )
        return scope.get_current_value(weight)

    def stateless_step(grad):
        [new], _ = optimizer.stateless_apply(
            state, [grad], [weight.value], scaled=True, axis_name="batch"
        )
        return new

    chosen = stateless_step if method == "stateless_apply" else step
    return np.asarray(jax.vmap(chosen, axis_name="batch")(grads))


@ON_JAX
def test_float16_gradients_are_averaged_in_float32():
    import jax

    optimizer, weight = make("LossScaleOptimizer"), keras.Variable([0.0])
    optimizer.build([weight])
    # Their sum is more than float16 holds.
    grads = ops.full((4, 1), 60000.0, dtype="float16")
    result = _step_of_four(jax, optimizer, weight, grads, "apply")
    assert result.tolist() == [[-15000.0]] * 4


@ON_JAX
def test_gradient_that_overwrites_its_variable_is_not_averaged():
    import jax

    weight, scale = keras.Variable([4.0]), keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    optimizer = make("LossScaleOptimizer")
    optimizer.build([weight, scale])

    def step(*grads):
        with keras.StatelessScope() as scope:
            optimizer.apply(grads, [weight, scale], scaled=True, axis_name="batch")
        return [scope.get_current_value(v) for v in (weight, scale)]

    grads = ops.array([[4.0], [12.0]]), ops.array([3.0, 5.0])
    moved, overwritten = jax.vmap(step, axis_name="batch")(*grads)
    # By half of the mean, of which the scale is 2.
    assert moved.tolist() == [[2.0], [2.0]]
    assert overwritten.tolist() == [3.0, 5.0]


@ON_JAX
@pytest.mark.parametrize("name", ["SGD", "LARS", "LAMB", "NovoGrad"])
def test_shard_map_on_single_device_matches_jitted_step(name):
    import jax
    from jax.sharding import Mesh, PartitionSpec

    if not hasattr(jax, "shard_map"):
        pytest.skip(f"JAX {jax.__version__} has no jax.shard_map")
    inner = {
        "SGD": lambda: keras.optimizers.SGD(0.5),
        "LARS": lambda: keras_lso.LARS(0.5),
        "LAMB": lambda: keras_lso.LAMB(0.5),
        "NovoGrad": lambda: keras_lso.NovoGrad(0.5),
    }[name]()
    weight = keras.Variable([4.0, 3.0])
    optimizer = keras_lso.LossScaleOptimizer(inner)
    optimizer.build([weight])
    state = [v.value for v in optimizer.variables]

    def step(grad, value):
        return optimizer.stateless_apply(state, [grad], [value])[0][0]

    spec = PartitionSpec("batch")
    mesh = Mesh(jax.devices(), "batch")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    sharded, alone = jax.jit(sharded), jax.jit(step)
    for grad, is_applied in (([8.0, -2.0], True), ([np.nan, 1.0], False)):
        args = np.array(grad, "float32"), weight.value
        # The same sums, but fused otherwise.
        np.testing.assert_allclose(sharded(*args), alone(*args), rtol=1e-6)
        assert ((alone(*args) != weight.value) == is_applied).all()


@ON_JAX
def test_loss_scale_policy_receives_largest_magnitude_of_all_shards():
    import jax
    from jax.sharding import Mesh, PartitionSpec

    if not hasattr(jax, "shard_map"):
        pytest.skip(f"JAX {jax.__version__} has no jax.shard_map")
    weight = keras.Variable([4.0, 3.0])
    policy = keras_lso.loss_scales.LogMaxLossScale()
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), loss_scale=policy
    )
    optimizer.build([weight])
    state = [v.value for v in optimizer.variables]
    own = [v is policy.scale for v in optimizer.variables].index(True)

    def scale_after(grad, value):
        return optimizer.stateless_apply(state, [grad], [value])[1][own]

    spec, the_same_on_all = PartitionSpec("batch"), PartitionSpec()
    sharded = jax.shard_map(
        scale_after,
        mesh=Mesh(jax.devices(), "batch"),
        in_specs=(spec, spec),
        # JAX refuses what differs, as far as it knows, from device to device.
        out_specs=the_same_on_all,
    )
    grad = np.array([64.0, -2.0], "float32")
    assert float(jax.jit(sharded)(grad, weight.value)) == 2.0 ** (16 - 6)
