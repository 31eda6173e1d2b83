"""`LossScaleOptimizer`: scaling, unscaling, applying and skipping.

Most numbers here are small integers and powers of two, so that float32 is exact.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale
from testing.harness import Harness

INF = np.inf


def tensors(*values, dtype="float32"):
    return [
        None if v is None else ops.convert_to_tensor(np.asarray(v, dtype))
        for v in values
    ]


def values_of(variables):
    return [np.asarray(v.numpy()).tolist() for v in variables]


@pytest.fixture
def weights():
    return [keras.Variable([10.0, 20.0]), keras.Variable(30.0)]


@pytest.fixture
def optimizer(weights):
    """One step subtracts the unscaled gradients; the scale is 8."""
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=1000
    )
    optimizer.build(weights)
    return optimizer


def test_scale_loss_multiplies_loss_by_current_scale(optimizer):
    assert float(optimizer.scale_loss(3.0)) == 24.0
    assert float(optimizer.get_scaled_loss(3.0)) == 24.0
    assert float(optimizer.scale_loss(ops.convert_to_tensor(3.0))) == 24.0
    optimizer.apply(tensors([INF, 0], 0.0))
    assert float(optimizer.scale_loss(3.0)) == 12.0


def test_optimizer_built_in_stateless_scope_scales_there(weights):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    with keras.StatelessScope():
        optimizer.build(weights)
        assert float(optimizer.scale_loss(1.0)) == 8.0
    assert float(optimizer.scale_loss(1.0)) == 8.0


def test_scaled_callable_loss_uses_scale_at_time_of_call(optimizer):
    losses = iter([3.0, 5.0])
    scaled = optimizer.get_scaled_loss(lambda: next(losses))
    assert float(scaled()) == 24.0
    optimizer.apply(tensors([INF, 0], 0.0))
    assert float(scaled()) == 20.0


@pytest.mark.parametrize("loss", [3.0, [3.0], [[3.0, 3.0], [3.0, 3.0]]])
def test_float16_loss_is_scaled_in_float32(loss):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0))
    loss = ops.convert_to_tensor(loss, dtype="float16")
    for scaled in (optimizer.scale_loss(loss), optimizer.get_scaled_loss(loss)):
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        # Larger than any float16.
        assert np.all(ops.convert_to_numpy(scaled) == 3 * 2.0**15)


def test_get_unscaled_gradients_divides_by_scale_and_keeps_none(optimizer):
    unscaled = optimizer.get_unscaled_gradients(tensors([8.0, -4.0], None, 1.0))
    assert isinstance(unscaled, list)
    np.testing.assert_array_equal(ops.convert_to_numpy(unscaled[0]), [1.0, -0.5])
    assert unscaled[1] is None
    assert float(unscaled[2]) == 0.125


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_unscaled_float16_and_bfloat16_gradients_are_float32(dtype):
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=2.0**20, max_scale=2.0**24
    )
    tiny = 2.0**-14  # the smallest normal float16
    gradient = ops.convert_to_tensor([tiny, 1.0], dtype=dtype)
    (unscaled,) = optimizer.get_unscaled_gradients([gradient])
    assert keras.backend.standardize_dtype(unscaled.dtype) == "float32"
    np.testing.assert_array_equal(
        ops.convert_to_numpy(unscaled), [tiny / 2.0**20, 2.0**-20]
    )


def test_apply_does_not_flush_small_float16_gradients():
    weight = keras.Variable([0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**20)
    gradient = ops.convert_to_tensor([2.0**-14], dtype="float16")
    optimizer.apply([gradient], [weight])
    assert values_of([weight]) == [[-(2.0**-34)]]


def test_unscaled_sparse_gradient_stays_sparse(optimizer, sparse_gradient):
    values = np.array([[8.0], [16.0], [24.0]], "float32")
    gradient = sparse_gradient(values, [2, 0, 0], (3, 1))
    (unscaled,) = optimizer.get_unscaled_gradients([gradient])
    assert type(unscaled) is type(gradient)
    table = keras.Variable(np.zeros((3, 1), "float32"))
    plain = keras.optimizers.SGD(1.0)
    plain.apply([unscaled], [table])
    assert values_of([table]) == [[[-5.0], [0.0], [-1.0]]]


def _apply(optimizer, grads, weights, **arguments):
    optimizer.apply(grads, weights, **arguments)


def _apply_gradients(optimizer, grads, weights, **arguments):
    optimizer.apply_gradients(zip(grads, weights, strict=True), **arguments)


def _stateless_apply(optimizer, grads, weights, **arguments):
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no `stateless_apply` on TensorFlow")
    variables = optimizer.variables
    new_weights, new_variables = optimizer.stateless_apply(
        [ops.copy(v) for v in variables],
        grads,
        [ops.copy(w) for w in weights],
        **arguments,
    )
    for variable, value in zip(weights, new_weights, strict=True):
        variable.assign(value)
    for variable, value in zip(variables, new_variables, strict=True):
        variable.assign(value)


@pytest.fixture(params=[_apply, _apply_gradients, _stateless_apply])
def apply(request):
    return request.param


AS_SCALED = [[9.0, 20.0], 28.0]  # a step with (8, 0) and 16 at a scale of 8
AS_UNSCALED = [[2.0, 20.0], 14.0]
GRADIENTS = ([8.0, 0.0], 16.0)


SCALINGS = {
    "scale_loss": lambda o: lambda: o.scale_loss(1.0),
    "get_scaled_loss": lambda o: lambda: o.get_scaled_loss(1.0),
    "get_scaled_loss of a callable": lambda o: lambda: o.get_scaled_loss(lambda: 1.0),
    "the call of its result": lambda o: o.get_scaled_loss(lambda: 1.0),
}


@pytest.mark.parametrize("prepare", SCALINGS.values(), ids=SCALINGS)
def test_next_scaled_loss_marks_gradients_as_scaled(optimizer, weights, apply, prepare):
    scale = prepare(optimizer)
    optimizer.get_unscaled_gradients(tensors(1.0))
    scale()
    apply(optimizer, tensors(*GRADIENTS), weights)
    assert values_of(weights) == AS_SCALED


@pytest.mark.parametrize("unscaled", [True, False])
def test_two_consecutive_steps_treat_gradients_alike(
    optimizer, weights, apply, unscaled
):
    optimizer.scale_loss(1.0)
    gradients = tensors(*GRADIENTS)
    if unscaled:
        gradients = optimizer.get_unscaled_gradients(gradients)
    apply(optimizer, gradients, weights)
    apply(optimizer, gradients, weights)
    assert values_of(weights) == [[8.0, 20.0], 26.0]


@pytest.mark.parametrize("marked_unscaled", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_scaled_argument_overrides_last_call_for_single_step(
    optimizer, weights, apply, marked_unscaled, scaled
):
    optimizer.scale_loss(1.0)
    if marked_unscaled:
        optimizer.get_unscaled_gradients(tensors(1.0))
    apply(optimizer, tensors(*GRADIENTS), weights, scaled=scaled)
    assert values_of(weights) == (AS_SCALED if scaled else AS_UNSCALED)
    # It holds for this one step only.
    for weight, value in zip(weights, ([10.0, 20.0], 30.0), strict=True):
        weight.assign(value)
    apply(optimizer, tensors(*GRADIENTS), weights)
    assert values_of(weights) == (AS_UNSCALED if marked_unscaled else AS_SCALED)


def test_non_finite_unscaled_gradients_skip_step(optimizer, weights, apply):
    optimizer.scale_loss(1.0)
    gradients = optimizer.get_unscaled_gradients(tensors([8.0, np.nan], 16.0))
    apply(optimizer, gradients, weights)
    assert values_of(weights) == [[10.0, 20.0], 30.0]
    assert float(optimizer.loss_scale) == 4.0


def test_compiled_step_ignores_calls_made_outside(optimizer, weights, compiled):
    def tf_keras_step(*grads):
        optimizer.get_scaled_loss(1.0)
        unscaled = optimizer.get_unscaled_gradients(list(grads))
        optimizer.apply_gradients(zip(unscaled, weights, strict=True))

    def keras_3_step(*grads):
        optimizer.scale_loss(1.0)
        optimizer.apply(list(grads), weights)

    state = weights + optimizer.variables
    first, second = compiled(tf_keras_step, state), compiled(keras_3_step, state)
    for _ in range(2):  # traced, then not
        for step in (first, second):
            for stray in (
                lambda: optimizer.scale_loss(1.0),
                lambda: optimizer.get_unscaled_gradients(tensors(1.0)),
            ):
                stray()
                step(*tensors(*GRADIENTS))
    assert values_of(weights) == [[10.0 - 8, 20.0], 30.0 - 16]


def test_retraced_step_keeps_treating_gradients_as_unscaled(compiled):
    table = [keras.Variable(np.zeros(2, "float32"))]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.build(table)

    def step(gradients):
        unscaled = optimizer.get_unscaled_gradients([ops.sum(gradients, axis=0)])
        optimizer.apply(unscaled, table)

    step = compiled(step, table + optimizer.variables)
    for rows in (1, 2, 1, 3):  # each new shape is a new trace
        step(ops.ones((rows, 2)) * 8.0)
    assert values_of(table) == [[-7.0, -7.0]]


def test_first_apply_builds_optimizer(weights):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.apply(tensors(*GRADIENTS), weights)
    assert optimizer.built and optimizer.inner_optimizer.built
    assert values_of(weights) == AS_SCALED


def test_apply_defaults_to_variables_of_build(optimizer, weights):
    optimizer.apply(tensors(*GRADIENTS))
    assert values_of(weights) == AS_SCALED


def test_apply_trains_subset_of_variables_alone(optimizer, weights):
    optimizer.apply(tensors(16.0), weights[1:])
    assert values_of(weights) == [[10.0, 20.0], 28.0]


def test_optimizer_without_variables_accepts_empty_steps():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([])
    optimizer.apply([], [])
    optimizer.apply([])
    assert int(optimizer.iterations) == 0
    assert float(optimizer.loss_scale) == 2.0**15


@pytest.mark.parametrize("finite", [True, False])
def test_update_scale_false_leaves_scale_and_counter_unchanged(
    optimizer, weights, apply, finite
):
    optimizer.apply(tensors([0.0, 0.0], 0.0), weights)
    assert int(optimizer.dynamic_counter) == 1
    gradients = tensors(*GRADIENTS) if finite else tensors([INF, 0.0], 0.0)
    apply(optimizer, gradients, weights, update_scale=False)
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.dynamic_counter) == 1
    # The step is still applied or skipped, and counted.
    assert values_of(weights) == (AS_SCALED if finite else [[10.0, 20.0], 30.0])
    assert int(optimizer.skipped_steps) == (0 if finite else 1)
    assert bool(optimizer.last_step_applied) is finite


def test_gradient_is_divided_by_scale_before_scale_grows(weights):
    # The scale moves only after the step: 16 / 8, not 16 / 16.
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=1
    )
    optimizer.apply(tensors([16.0, 0.0], 0.0), weights)
    assert values_of(weights) == [[8.0, 20.0], 30.0]
    assert float(optimizer.loss_scale) == 16.0


INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.5),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.5),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.5, centered=True, momentum=0.9),
    "accumulation and EMA": lambda: keras.optimizers.SGD(
        0.5, use_ema=True, gradient_accumulation_steps=3
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_gradients_that_overflow_only_when_unscaled_skip_step(make, weights, compiled):
    # At a scale below 1 a finite float32 becomes inf when it is divided by it.
    optimizer = LossScaleOptimizer(make(), initial_scale=2.0**-14)
    run = Harness(optimizer, weights, compiled=compiled)
    with run.unchanged():
        run.apply(tensors([1e36, 1.0], 1.0))
    assert run.skipped == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("update_scale", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_stateless_apply_is_bitwise_equal_to_apply(compiled, scaled, update_scale):
    run, twin = (
        # A slot for each, and a policy with state of its own.
        Harness(
            LossScaleOptimizer(
                keras.optimizers.SGD(0.5, momentum=0.5),
                loss_scale=DynamicLossScale(8.0, increment_period=2, hysteresis=2),
            ),
            [keras.Variable([1.0, -0.0]), keras.Variable(3.0)],
        )
        for _ in "ab"
    )
    bad = [0.0, INF, 2.0, 0.0, np.nan, INF, 1.0]
    steps = [[np.float32([8.0, 0.0]), np.float32(value)] for value in bad]
    run.assert_stateless_steps_equal_those_of(
        twin, steps, compiled, scaled=scaled, update_scale=update_scale
    )


def test_wrapper_of_trained_optimizer_counts_no_skipped_steps(weights):
    inner = keras.optimizers.SGD(1.0)
    for _ in range(3):
        inner.apply(tensors([0.0, 0.0], 0.0), weights)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.apply(tensors(*GRADIENTS), weights)
    assert values_of(weights) == AS_SCALED
    assert int(optimizer.iterations) == 4
    assert int(optimizer.skipped_steps) == 0


def test_second_build_leaves_variables_unchanged(optimizer, weights, snapshot):
    optimizer.apply(tensors([INF, 0.0], 0.0))
    before = snapshot(optimizer.variables)
    optimizer.build(weights)
    assert snapshot(optimizer.variables) == before
