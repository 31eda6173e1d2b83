"""Steps of an optimizer, alone or in a `LossScaleOptimizer`, by unscaled gradients."""

import numpy as np

from keras_lso import LossScaleOptimizer
from testing.tensors import tensor

SCALE = 2.0**10


def apply(optimizer, grads, variables):
    """Applies unscaled gradients as `fit` would."""
    if isinstance(optimizer, LossScaleOptimizer):
        grads = [np.asarray(g) * SCALE for g in grads]
    optimizer.apply([tensor(g) for g in grads], variables)


def stepper(compile_, optimizer, variables):
    """Returns `apply` as a function `step(grads)`, compiled once for all steps."""
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compile_(step, [*variables, *optimizer.variables])
    scale = SCALE if isinstance(optimizer, LossScaleOptimizer) else 1.0
    return lambda grads: call([tensor(g * scale) for g in grads])


def in_loss_scale_optimizer(optimizer):
    return LossScaleOptimizer(optimizer, initial_scale=SCALE)
