"""A `LossScaleOptimizer` with a state: counters, slots and a scale that has moved."""

import keras
import numpy as np
from keras import ops

from keras_lso import LossScaleOptimizer
from testing.beside_keras import bits


def new_weights():
    return [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]


def new_optimizer(weights, **arguments):
    inner = keras.optimizers.Adam(0.5)
    arguments.setdefault("initial_scale", 8.0)
    if "loss_scale" in arguments:
        del arguments["initial_scale"]
    optimizer = LossScaleOptimizer(inner, **arguments)
    optimizer.build(weights)
    return optimizer


def step(optimizer, finite=True, **arguments):
    bad = 0.0 if finite else np.inf
    grads = [ops.convert_to_tensor([8.0, bad]), ops.convert_to_tensor(-4.0)]
    optimizer.apply(grads, **arguments)


def trained(**arguments):
    """Four steps, of which the second is skipped."""
    optimizer = new_optimizer(new_weights(), **arguments)
    for finite in [True, False, True, True]:
        step(optimizer, finite)
    return optimizer


def saved(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def bits_of(model):
    """Returns the bytes of its trainable variables and its optimizer's variables."""
    return bits([*model.trainable_variables, *model.optimizer.variables])


def number(tensor):
    return ops.convert_to_numpy(tensor).item()
