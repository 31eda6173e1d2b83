"""Gradients with outliers, of two replicas, and what a guard is to say of them."""

import keras
import numpy as np

import keras_lso
from testing.spikes import Model

SHAPES = ((8, 4), (8,))
SPIKES = (9, 17)
# So are steps judged: the sizes of the others differ by a fifth at most.
GUARD = {"threshold": 6.0, "window": 8, "warmup": 4}


def gradients(step, replica):
    """Returns the gradients of a replica, of which only one has the outlier."""
    random = np.random.default_rng((step, replica))
    factor = 200.0 if step in SPIKES and replica == step % 2 else 1.0
    found = [random.uniform(0.9, 1.1, size) * factor for size in SHAPES]
    return [array.astype("float32") for array in found]


def make(shapes=SHAPES):
    """Returns a built optimizer and its variables."""
    variables = [keras.Variable(np.ones(s, "float32")) for s in shapes]
    optimizer = keras_lso.GuardedOptimizer(
        keras.optimizers.Adam(0.01), spike_guard=keras_lso.SpikeGuard(**GUARD)
    )
    optimizer.build(variables)
    return optimizer, variables


def expected(steps, together):
    """Returns which steps the model applies, given how gradients come `together`."""
    model, found = Model(keras_lso.SpikeGuard(**GUARD)), []
    for step in range(steps):
        pairs = zip(gradients(step, 0), gradients(step, 1), strict=True)
        whole = [together(np.stack(pair).astype("float64"), 0) for pair in pairs]
        found.append(model.applies(np.sqrt(sum((g**2).sum() for g in whole))))
    return found
