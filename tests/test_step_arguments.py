"""Steps and setters refuse bad input, and change nothing.

Each message names the argument, what came, and what to write instead.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso._core.step import Gradients
from keras_lso.loss_scales import DynamicLossScale
from testing.refusals import refused, sgd


@pytest.fixture
def weights():
    return [keras.Variable([1.0, 2.0], name="w"), keras.Variable(3.0, name="b")]


@pytest.fixture
def optimizer(weights):
    """Has taken one finite step and one that overflowed."""
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    for bad in (0.0, np.inf):
        optimizer.apply(gradients(np.array([1.0, bad], "float32"), 4.0), weights)
    optimizer.get_unscaled_gradients([])
    return optimizer


def gradients(*values):
    return [None if v is None else ops.convert_to_tensor(v) for v in values]


@pytest.fixture(autouse=True)
def nothing_is_half_changed(request, snapshot):
    """Compares the optimizer of a test before and after it."""
    if "optimizer" not in request.fixturenames:
        yield
        return
    optimizer = request.getfixturevalue("optimizer")
    weights = request.getfixturevalue("weights")

    def state():
        return (
            snapshot(weights),
            snapshot(optimizer.variables),
            float(optimizer.loss_scale),
            int(optimizer.dynamic_counter),
            int(optimizer.skipped_steps),
            bool(optimizer.last_step_applied),
            optimizer._scaling.gradients,
        )

    before = state()
    assert before[2:] == (4.0, 0, 1, False, Gradients.UNSCALED)
    yield
    assert state() == before
    optimizer.loss_scale_policy.claim(optimizer)


@pytest.fixture(params=["apply", "apply_gradients"])
def apply(request, optimizer):
    def by_pairs(grads, variables):
        # `zip` would hide a difference in length.
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    return {"apply": optimizer.apply, "apply_gradients": by_pairs}[request.param]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_mismatched_counts_of_gradients_and_variables_are_rejected(
    optimizer, weights, count
):
    grads = gradients(*[1.0] * count)
    words = ("`grads`", "`trainable_variables`", f"{count} gradients", "2 variables")
    with refused(ValueError, *words, "one-to-one", "Pass None"):
        optimizer.apply(grads, weights)
    with refused(ValueError, *words, "one-to-one", "Pass None"):
        optimizer.apply(grads)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 2), (2, 1)])
def test_gradient_of_other_shape_is_rejected(apply, weights, shape):
    words = ("A gradient", "`grads`", "`trainable_variables`", weights[0].path)
    with refused(ValueError, *words, str(shape), "(2,)"):
        apply([ops.ones(shape), ops.ones(())], weights)
    # The first one fits, and is not trained either.
    with refused(ValueError, *words, str(shape), "(2,)"):
        apply([ops.ones(()), ops.ones(shape)], weights[::-1])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.function")
@pytest.mark.parametrize("known", [None, [None]])
def test_gradient_of_unknown_shape_is_accepted(weights, known):
    import tensorflow as tf

    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    optimizer.build(weights[:1])

    @tf.function(input_signature=[tf.TensorSpec(known)])
    def step(gradient):
        optimizer.apply([gradient], weights[:1])

    step(ops.array([8.0, 8.0]))
    assert weights[0].numpy().tolist() == [0.0, 1.0]


NO_GRADIENTS = ("No gradients provided for any variable", "`grads`", "None", "2")


def test_unknown_variable_is_rejected(apply, weights):
    stranger = keras.Variable([1.0, 2.0], name="stranger")
    with refused(ValueError, "Unknown variable", "stranger", "new"):
        apply(gradients(np.ones(2, "float32"), 1.0), [stranger, weights[1]])


def test_wrapper_of_built_optimizer_rejects_other_variables(weights):
    inner = sgd()
    inner.build(weights)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    with refused(ValueError, "Unknown variable", "stranger"):
        optimizer.build([keras.Variable(1.0, name="stranger")])
    assert not optimizer.built


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's functions")
@pytest.mark.parametrize(
    "make",
    [
        lambda: LossScaleOptimizer(sgd(), dynamic=False, initial_scale=8.0),
        lambda: keras_lso.GuardedOptimizer(sgd()),
        lambda: keras_lso.LARS(1.0),
    ],
)
def test_apply_in_compiled_function_is_an_error_on_jax(make, weights):
    import jax

    optimizer = make()
    optimizer.build(weights)
    step = jax.jit(lambda *grads: optimizer.apply([None, *grads], weights))
    with refused(ValueError, "`apply`", "tracers", "`optimizer.stateless_apply("):
        step(ops.ones(()))
    # The values are still there.
    state = [v.numpy() for v in (*weights, *optimizer.variables)]
    assert all(np.isfinite(value).all() for value in state)
    optimizer.apply(gradients(np.ones(2, "float32"), 1.0), weights)


@pytest.mark.parametrize("is_built", [False, True])
def test_wrapper_of_keras_around_this_one_is_an_error(weights, is_built):
    optimizer = LossScaleOptimizer(sgd())
    if is_built:
        optimizer.build(weights)
    around = keras.optimizers.LossScaleOptimizer(optimizer)
    with refused(TypeError, "around this LossScaleOptimizer", "itself to `compile`"):
        around.apply(gradients(np.ones(2, "float32"), 1.0), weights)
    assert weights[0].numpy().tolist() == [1.0, 2.0]
    assert optimizer.built == is_built
    # Without a loss scale, only Keras's class scales.
    guarded = keras_lso.GuardedOptimizer(sgd())
    keras.optimizers.LossScaleOptimizer(guarded).build(weights)


def test_loss_is_scaled_once():
    optimizer, w = LossScaleOptimizer(sgd()), keras.Variable([1.0, 2.0])
    optimizer.build([w])
    loss = ops.convert_to_tensor(2.0)
    for scale in (optimizer.scale_loss, optimizer.get_scaled_loss):
        scaled = scale(loss)
        for again in (optimizer.scale_loss, optimizer.get_scaled_loss):
            with refused(ValueError, "multiplied by the loss scale already", "once"):
                again(scaled)
    # Two losses of a step, each by itself.
    assert optimizer.scale_loss(loss) is not optimizer.scale_loss(loss)
    with refused(ValueError, "multiplied by the loss scale already", "minimize"):
        optimizer.minimize(lambda: optimizer.scale_loss(ops.sum(ops.square(w))), [w])
    np.testing.assert_array_equal(ops.convert_to_numpy(w), [1.0, 2.0])


def test_gradients_are_unscaled_once():
    optimizer = LossScaleOptimizer(sgd())
    optimizer.scale_loss(2.0)
    unscaled = optimizer.get_unscaled_gradients(gradients(1.0, None))
    with refused(ValueError, "divided by the loss scale already", "to `apply`"):
        optimizer.get_unscaled_gradients(unscaled)
    optimizer.get_unscaled_gradients(gradients(1.0, None))


def test_names_of_frozen_layers_and_other_models_are_in_the_message(optimizer):
    stranger = keras.Variable([1.0, 2.0], name="stranger")
    words = "frozen or unfrozen", "another model", "`model.compile`"
    with refused(ValueError, "Unknown variable: stranger", *words):
        optimizer.apply(gradients(np.ones(2, "float32")), [stranger])


NO_ARRAYS = {
    "pairs in two lists": lambda o, g, w: o.apply_gradients(g, w),
    "gradients alone": lambda o, g, w: o.apply_gradients(g),
    "swapped pairs": lambda o, g, w: o.apply_gradients(zip(w, g, strict=True)),
    "tensors for variables": lambda o, g, w: o.apply(g, list(map(np.asarray, g))),
    "one tensor": lambda o, g, w: o.apply(g[0], w),
    "a loss of variables": lambda o, g, w: o.scale_loss(w),
    "an optimizer of variables": lambda o, g, w: LossScaleOptimizer(w),
}


@pytest.mark.parametrize("mistake", NO_ARRAYS)
def test_messages_show_shapes_and_no_arrays(optimizer, weights, mistake):
    grads = gradients(np.array([7.25, 7.5], "float32"), 7.25)
    with pytest.raises(TypeError) as info:
        NO_ARRAYS[mistake](optimizer, grads, weights)
    message = str(info.value)
    assert "of shape (2,)>" in message
    assert not [n for n in ("7.25", "7.5", "[1.", "array(") if n in message]


def test_two_lists_for_apply_gradients_say_how_to_make_pairs(optimizer, weights):
    pairs = "`apply_gradients(zip(grads, variables))`"
    with refused(TypeError, "`name`", pairs, "`apply(grads, variables)`"):
        optimizer.apply_gradients(gradients(np.ones(2, "float32"), 1.0), weights)


WRAPPED_AGAIN = {"itself": lambda inner: inner, "inside of LARC": keras_lso.LARC}


@pytest.mark.parametrize("again", WRAPPED_AGAIN.values(), ids=WRAPPED_AGAIN)
def test_wrapped_optimizer_cannot_be_wrapped_again(again):
    inner = sgd()
    weight = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(inner, name="the_first")
    policy = DynamicLossScale()
    words = ("already wrapped", "'the_first'", "SGD.from_config(", "Received")
    with refused(ValueError, "`inner_optimizer`", *words):
        LossScaleOptimizer(again(inner), loss_scale=policy)
    # The refused optimizer has not claimed the policy.
    LossScaleOptimizer(sgd(), loss_scale=policy)
    optimizer.apply(gradients(np.inf), [weight])
    optimizer.apply(gradients(1.0), [weight])
    assert int(optimizer.skipped_steps) == int(optimizer.iterations) == 1


def test_unbuilt_optimizer_requires_variables_in_apply():
    optimizer = LossScaleOptimizer(sgd())
    words = ("`grads`", "`trainable_variables`", "optimizer.build(trainable_variables)")
    with refused(ValueError, *words):
        optimizer.apply(gradients(1.0))
    assert not optimizer.built


@pytest.mark.parametrize(
    "grads, words",
    [
        ([1.0], ("1 gradients", "2 variables", "Pass None")),
        ([None, None], NO_GRADIENTS),
    ],
)
def test_rejected_first_step_builds_nothing(weights, grads, words):
    optimizer = LossScaleOptimizer(sgd())
    with refused(ValueError, *words):
        optimizer.apply(gradients(*grads), weights)
    assert not optimizer.built
    assert not optimizer.inner_optimizer.built
    optimizer.apply(gradients(np.ones(2, "float32"), 1.0), weights)
    assert int(optimizer.iterations) == 1


def test_stateless_apply_is_rejected_on_tensorflow(optimizer, weights):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("It works on JAX and PyTorch; the tests below are about that")
    with refused(ValueError, "stateless_apply", "TensorFlow", "`optimizer.apply`"):
        optimizer.stateless_apply(
            [v.value for v in optimizer.variables],
            gradients([1.0, 1.0], 1.0),
            [w.value for w in weights],
        )


@pytest.fixture
def stateless():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no `stateless_apply` on TensorFlow")


def test_stateless_apply_requires_built_optimizer(stateless):
    optimizer = LossScaleOptimizer(sgd())
    words = ("`stateless_apply`", "must be built", "build(trainable_variables)")
    with refused(ValueError, *words):
        optimizer.stateless_apply([], [], [])


def test_stateless_apply_rejects_mismatched_counts_of_values(
    stateless, optimizer, weights
):
    own = [v.value for v in optimizer.variables]
    trained = [w.value for w in weights]
    grads = gradients(np.ones(2, "float32"), 1.0)
    words = (f"a list of {len(own)} tensors", f"Received {len(own) - 1}")
    with refused(ValueError, "`optimizer_variables`", *words):
        optimizer.stateless_apply(own[:-1], grads, trained)
    words = ("a list of 2 tensors", "Received 1")
    with refused(ValueError, "`trainable_variables`", *words):
        optimizer.stateless_apply(own, grads, trained[:1])
    with refused(ValueError, "`grads`", "1 gradients", "2 variables"):
        optimizer.stateless_apply(own, grads[:1], trained)
    with refused(ValueError, *NO_GRADIENTS):
        optimizer.stateless_apply(own, [None, None], trained)


def test_loss_scale_factor_cannot_be_set_to_number(optimizer):
    words = ("`loss_scale_factor`", "dynamic=False", "initial_scale=512")
    with refused(ValueError, *words):
        optimizer.loss_scale_factor = 512
    optimizer.loss_scale_factor = None
    assert optimizer.inner_optimizer.loss_scale_factor is None
