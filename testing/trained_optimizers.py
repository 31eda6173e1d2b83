"""A `LossScaleOptimizer` with a state: counters, slots and a scale that has moved."""

import keras
import numpy as np
from keras import ops

from keras_lso import LossScaleOptimizer
from testing.harness import Harness, bits


def new_run(compiled=None, **arguments):
    if "loss_scale" not in arguments:
        arguments.setdefault("initial_scale", 8.0)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.5), **arguments)
    start = [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]
    return Harness(optimizer, start, compiled=compiled)


def trained(**arguments):
    """Returns a run of four steps, of which the second was skipped."""
    run = new_run(**arguments).steps(1)
    run.overflow()
    return run.steps(2)


def innermost(optimizer):
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def filled(optimizer, shapes, start=1):
    """Builds an optimizer, and gives each variable but the rate another number."""
    optimizer.build([keras.Variable(np.ones(shape, "float32")) for shape in shapes])
    inner = innermost(optimizer)
    own = [v for v in optimizer.variables if v is not inner._learning_rate]
    for i, variable in enumerate(own, start):
        variable.assign(np.full(variable.shape, i))
    return optimizer


def named_slots(optimizer):
    """The bytes of all that Keras's classes save of the innermost optimizer."""
    inner = innermost(optimizer)
    own = [v for v in inner.variables if v is not inner._learning_rate]
    return [v.numpy().tobytes() for v in own if "/" in v.path]


def saved(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def bits_of(model):
    """Returns the bytes of its trainable variables and its optimizer's variables."""
    return bits([*model.trainable_variables, *model.optimizer.variables])


def number(tensor):
    return ops.convert_to_numpy(tensor).item()
