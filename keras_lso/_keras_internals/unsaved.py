"""The variables that Keras's `LossScaleOptimizer` does not save."""

import keras
import numpy as np
from keras import ops

from keras_lso._keras_internals.optimizers import stepping
from keras_lso._keras_internals.variables import path_of

# From this step on, Nadam multiplies its product by `beta_1`, in float32.
_STEPS_TO_CONSTANT = 1000


def saved_by_keras(optimizer):
    """Returns the variables of an optimizer that Keras's wrapper of it saves."""
    # The wrapper builds it with tracking off, and so loses variables that are only
    # attributes: Nadam's product of momenta, and Adafactor's for vectors.
    names = {o.name for o in stepping(optimizer)}
    return [v for v in optimizer.variables if _scope(v) in names]


def restore_unsaved(optimizer, loaded):
    """Computes the variables that a file does not hold from the count of steps."""
    # Nadam's product of momenta: from 1, the next steps would be far too large.
    loaded = {id(v) for v in loaded}
    for nadam in stepping(optimizer):
        if not isinstance(nadam, keras.optimizers.Nadam) or not nadam.built:
            continue
        if id(nadam._u_product) not in loaded:
            steps = int(ops.convert_to_numpy(nadam.iterations))
            nadam._u_product.assign(nadam_product(nadam, steps))


def nadam_product(optimizer, steps):
    """Returns Nadam's product of momenta after so many steps, in float32."""
    beta_1 = np.float32(optimizer.beta_1)
    product = np.float32(1.0)
    for step in range(1, min(steps, _STEPS_TO_CONSTANT) + 1):
        decay = np.power(np.float32(0.96), np.float32(step))
        product *= beta_1 * (1 - np.float32(0.5) * decay)
    return product * beta_1 ** max(steps - _STEPS_TO_CONSTANT, 0)


def _scope(variable):
    """Returns the part of a variable's path before the name, "" if there is none."""
    return path_of(variable).rpartition("/")[0].rpartition("/")[2]
