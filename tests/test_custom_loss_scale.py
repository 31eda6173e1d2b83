"""A loss-scale policy of the user's own, in a `LossScaleOptimizer`."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import loss_scales
from keras_lso.loss_scales import FixedLossScale
from testing.loss_scales import CountingOverflows


@pytest.fixture
def with_custom_policy():
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), loss_scale=CountingOverflows()
    )
    variables = [keras.Variable([0.0, 0.0]), keras.Variable(0.0)]
    optimizer.build(variables)
    return optimizer, variables


@pytest.mark.parametrize("scaled", [True, False])
def test_custom_policy_receives_largest_unscaled_gradient(
    with_custom_policy, compiled, scaled
):
    optimizer, variables = with_custom_policy

    def apply(*grads):
        optimizer.apply(list(grads), variables, scaled=scaled)

    step = compiled(apply, variables + optimizer.variables)
    factor = 8.0 if scaled else 1.0  # the initial scale is 8
    step(*[ops.convert_to_tensor(factor * np.float32(g)) for g in ([1.0, -4.0], 2.0)])
    np.testing.assert_array_equal(variables[0].numpy(), [-1.0, 4.0])
    assert float(optimizer.loss_scale) == 64.0 / 4.0

    step(*[ops.convert_to_tensor(np.float32(g)) for g in ([1.0, np.nan], 2.0)])
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.loss_scale_policy.overflows.numpy()) == 1
    np.testing.assert_array_equal(variables[0].numpy(), [-1.0, 4.0])


def test_custom_policy_receives_largest_gradient_of_several_losses(
    with_custom_policy, compiled
):
    optimizer, [weight, _] = with_custom_policy

    def apply(grads, update_scale):
        optimizer.apply([grads], [weight], scaled=False, update_scale=update_scale)

    first = compiled(lambda g: apply(g, False), [weight, *optimizer.variables])
    last = compiled(lambda g: apply(g, True), [weight, *optimizer.variables])
    for step, gradient, scale in [
        (first, 16.0, 8.0),
        (first, 2.0, 8.0),
        (last, 4.0, 64.0 / 16.0),
        # An update forgets the earlier gradients.
        (last, 4.0, 64.0 / 4.0),
        (first, np.nan, 64.0 / 4.0),
        (last, 4.0, 64.0 / 8.0),
        (last, 4.0, 64.0 / 4.0),
    ]:
        step(ops.convert_to_tensor(np.float32([gradient, 1.0])))
        assert float(optimizer.loss_scale) == scale


def test_custom_policy_receives_no_float8_scales(with_custom_policy):
    optimizer, [weight, scale] = with_custom_policy
    scale.overwrite_with_gradient = True
    grads = [np.float32([16.0, 8.0]), np.float32(2.0**20)]
    optimizer.apply([ops.convert_to_tensor(g) for g in grads], [weight, scale])
    # Of 16, unscaled by 8: the other "gradient" is a new value.
    assert float(optimizer.loss_scale) == 64.0 / 2.0


def test_custom_policy_may_share_name_with_built_in_policy():
    own = type("FixedLossScale", (FixedLossScale,), {})
    config = keras.saving.serialize_keras_object(own(16.0))
    policy = loss_scales.get(config, custom_objects={"FixedLossScale": own})
    assert type(policy) is own
