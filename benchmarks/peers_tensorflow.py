"""What a user of tf.keras would run: its own LossScaleOptimizer, in a tf.function."""

import importlib.util
from functools import partial

import tensorflow as tf
import tf_keras

from benchmarks import inner as hyper
from benchmarks import model_garden
from benchmarks.rows_tensorflow import function_step

_ADAM = {
    "learning_rate": hyper.ADAM_RATE,
    "beta_1": hyper.BETA_1,
    "beta_2": hyper.BETA_2,
    "epsilon": hyper.EPSILON,
}


def _lars():
    """Returns the Model Garden's LARS; tf.keras has none."""
    return model_garden.load("lars").LARS(
        hyper.LARS_RATE,
        momentum=hyper.MOMENTUM,
        weight_decay_rate=hyper.WEIGHT_DECAY,
    )


_OPTIMIZERS = {
    "SGD": partial(tf_keras.optimizers.SGD, hyper.SGD_RATE),
    "SGD+momentum": partial(tf_keras.optimizers.SGD, hyper.SGD_RATE, hyper.MOMENTUM),
    "Adam": partial(tf_keras.optimizers.Adam, **_ADAM),
    "AdamW": partial(
        tf_keras.optimizers.AdamW, **_ADAM, weight_decay=hyper.WEIGHT_DECAY
    ),
    "LARS": _lars,
}


def peers(mode, inner):
    """Returns the peers of an inner optimizer: names, and what makes each `Step`."""
    if inner not in _OPTIMIZERS:
        return {}
    name = "tf_keras"
    if inner == "LARS":
        if importlib.util.find_spec("official") is None:
            return {}
        name = "tf_keras, Model Garden"
    return {name: partial(_step, mode, _OPTIMIZERS[inner])}


def _step(mode, make_optimizer, tensors):
    """Returns the step of tf.keras's guide to mixed precision.

    It has no masters of float16 variables. Who wants them casts by hand.
    """
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
        make_optimizer(), initial_scale=hyper.SCALE
    )
    weights = [tf.Variable(w) for w in tensors.weights()]
    masters = [] if tensors.dtype == tf.float32 else weights
    narrow = [tf.Variable(tf.cast(w, tensors.dtype)) for w in masters]
    scaled_gradients = tensors.gradients[True]
    # Otherwise it warns that nobody did.
    optimizer.get_scaled_loss(tf.constant(0.0))
    # Slots cannot be created under XLA.
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        optimizer.inner_optimizer._create_all_weights(weights)
    else:
        optimizer.build(weights)

    def apply():
        gradients = [tf.cast(g, tf.float32) for g in scaled_gradients]
        gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        for variable, master in zip(narrow, masters, strict=True):
            variable.assign(tf.cast(master, tensors.dtype))
        return optimizer.iterations

    def state():
        slots = optimizer.inner_optimizer.variables
        slots = slots() if callable(slots) else slots
        return [[v.numpy() for v in vs] for vs in (weights, slots)]

    return function_step(mode, apply, state)
