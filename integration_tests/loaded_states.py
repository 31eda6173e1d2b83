"""Models and optimizers of Keras 3 that resume from the state that tf.keras saved."""

import keras
import numpy as np

import keras_lso
from integration_tests.twin_models import OPTIMIZERS, gradients, start
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso._keras_internals.state import slots_of

STEPS = 10
# Each step rounds the slots and the weights to float32 a few times, at 6e-8 of the
# largest magnitude in the tensor. The largest difference after ten steps was a third of
# this share.
SHARE = 1e-6


def twin(make, saved):
    """Returns a Keras 3 model with the initial weights of the one of tf.keras."""
    model = make(keras)
    x = start(model)
    # The outputs differ unless the order of the variables is that of the layers.
    np.testing.assert_allclose(
        to_numpy(model(x, training=False)), saved.output, 1e-4, 1e-5
    )
    return model


def make_ours(name, **arguments):
    cls, defaults = OPTIMIZERS[name]
    return getattr(keras.optimizers, cls)(**{**defaults, **arguments})


def built(optimizer, model):
    optimizer.build(model.trainable_variables)
    return optimizer


def train(model, optimizer, steps, size=1.0):
    # The gradients are those of an unscaled loss.
    options = {}
    if isinstance(optimizer, keras_lso.LossScaleOptimizer):
        options["scaled"] = False
    for step in steps:
        grads = [keras.ops.convert_to_tensor(g) for g in gradients(model, step, size)]
        pairs = list(zip(grads, model.trainable_variables, strict=True))
        optimizer.apply_gradients(pairs, **options)


def our_slots(optimizer):
    innermost = chain_of(optimizer)[-1]
    slots = slots_of(innermost)
    if innermost.use_ema:
        slots["average"] = innermost._model_variables_moving_average
    return slots


def assert_same_slots(ours, saved):
    """The loaded slots are the saved ones, bit for bit, or rounded to bfloat16."""
    actual = our_slots(ours)
    assert actual.keys() == saved.slots.keys()
    for slot, values in saved.slots.items():
        for i, (a, e) in enumerate(zip(actual[slot], values, strict=True)):
            e = np.asarray(e).astype(a.dtype)
            np.testing.assert_array_equal(to_numpy(a), e, f"{slot} {i}")


def assert_close_weights(model, weights):
    for a, e in zip(model.trainable_variables, weights, strict=True):
        atol = SHARE * np.abs(e).max()
        np.testing.assert_allclose(to_numpy(a), e, 0, atol, err_msg=a.path)


def to_numpy(value):
    return np.array(keras.ops.convert_to_numpy(value))


def copy_weights(weights, model):
    for e, a in zip(weights, model.trainable_variables, strict=True):
        a.assign(e)
