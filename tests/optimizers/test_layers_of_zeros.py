"""Layers whose weights or gradients are all 0, as docs/large-batches.md has them."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LAMB, LARC, LARS
from testing.lars import SHARE
from testing.optimizer_steps import apply

RATE, EETA, DECAY = 0.5, 0.25, 0.125
WEIGHTS, ZEROS = [3.0, 4.0], [0.0, 0.0]


def lars(trust_ratio, **options):
    return lambda decay: LARS(
        RATE, 0.0, decay, EETA, trust_ratio=trust_ratio, **options
    )


MAKES = {
    "model_garden": lars("model_garden"),
    "model_garden, popular": lars("model_garden", classic_momentum=False),
    "paper": lars("paper"),
    "LAMB": lambda decay: LAMB(RATE, weight_decay_rate=decay),
}
# The share of itself by which a layer shrinks.
SHRINKS = {
    "model_garden": RATE * EETA,
    "model_garden, popular": RATE * EETA,
    "paper": RATE * DECAY,
    "LAMB": RATE,
}


def step_of(optimizer, weights, gradients):
    variable = keras.Variable(np.float32(weights))
    apply(optimizer, [gradients], [variable])
    return ops.convert_to_numpy(variable)


@pytest.mark.parametrize("name", MAKES)
def test_layer_without_gradient_shrinks_by_decay_times_trust_ratio(wrap, name):
    found = step_of(wrap(MAKES[name](DECAY)), WEIGHTS, ZEROS)
    expected = np.array(WEIGHTS) * (1 - SHRINKS[name])
    np.testing.assert_allclose(found, expected, rtol=SHARE)


@pytest.mark.parametrize("name", MAKES)
def test_layer_without_gradient_and_decay_does_not_move(wrap, name):
    assert step_of(wrap(MAKES[name](0.0)), WEIGHTS, ZEROS).tolist() == WEIGHTS


@pytest.mark.parametrize("name", MAKES)
def test_layer_of_zeros_has_trust_ratio_of_one(wrap, name):
    found = step_of(wrap(MAKES[name](DECAY)), ZEROS, [8.0, -8.0])
    # LAMB's direction is the gradient over its own size.
    size = 1.0 if name == "LAMB" else 8.0
    np.testing.assert_allclose(found, [-RATE * size, RATE * size], rtol=SHARE)


@pytest.mark.parametrize("mode", ["clip", "scale"])
@pytest.mark.parametrize("epsilon", [1e-7, 0.0])
def test_larc_rescales_by_min_update_only_layer_of_zeros(mode, epsilon):
    sgd = keras.optimizers.SGD(RATE, weight_decay=DECAY)
    larc = LARC(sgd, mode=mode, min_update=0.25, epsilon=epsilon)
    assert step_of(larc, ZEROS, [8.0, -8.0]).tolist() == [-1.0, 1.0]
    # Without a gradient the decay of the inner optimizer is all that moves it.
    larc = LARC(
        keras.optimizers.SGD(RATE, weight_decay=DECAY), mode=mode, epsilon=epsilon
    )
    expected = np.array(WEIGHTS) * (1 - RATE * DECAY)
    np.testing.assert_allclose(step_of(larc, WEIGHTS, ZEROS), expected, rtol=SHARE)
