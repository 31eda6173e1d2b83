"""The same gradients for ours and for a reference, of layers of every kind.

What `test_lars.py` and `test_lamb.py` share. Largest difference allowed, after each of
50 steps, or each fifth one where the reference's are recorded: 2e-6 of the tensor's
largest magnitude. Rounding of a step is 6e-8 of it at most; sums of squares in another
order add as much to a trust ratio.
"""

import keras
import numpy as np
from keras import ops

STEPS = 50
RECORDED = slice(4, None, 5)
SHARE = 2e-6
SHAPES = {
    "conv/kernel": (3, 3, 2, 4),
    "conv/bias": (4,),
    "bn/gamma": (4,),
    "bn/beta": (4,),
    "dense/kernel": (4, 3),
    "scale": (),
}
ZERO_AT_FIRST = ("conv/bias", "bn/beta")  # |w| is 0
WITHOUT_GRADIENT = ("dense/kernel",)  # |g| is 0


def make_start():
    """Returns the weights by their paths."""
    random = np.random.default_rng(1)
    return {
        path: np.zeros(shape, "float32")
        if path in ZERO_AT_FIRST
        else random.standard_normal(shape).astype("float32")
        for path, shape in SHAPES.items()
    }


def make_gradients():
    """Returns the gradients of each step; those of some are 0 at every third step."""
    random = np.random.default_rng(2)
    steps = []
    for step in range(STEPS):
        steps.append(
            {
                path: np.float32(10.0 ** random.integers(-3, 3))
                * random.standard_normal(shape).astype("float32")
                * np.float32(not (path in WITHOUT_GRADIENT and step % 3 == 0))
                for path, shape in SHAPES.items()
            }
        )
    return steps


def make_variables(start):
    variables = []
    for path, value in start.items():
        *scopes, name = path.split("/")
        with keras.name_scope(scopes[0] if scopes else "top"):
            variables.append(keras.Variable(value, name=name))
    return variables


def trajectory(optimizer, start, gradients):
    """Returns the weights after each step of ours."""
    variables = make_variables(start)
    steps = []
    for grads in gradients:
        optimizer.apply([ops.array(g) for g in grads.values()], variables)
        steps.append([np.array(ops.convert_to_numpy(v)) for v in variables])
    return steps


def model_gardens_steps(make, settings, rates, start, gradients):
    """Returns the weights after the steps to record of one of the Model Garden's."""
    import tensorflow as tf
    import tf_keras

    if rates is not None:
        schedule = tf_keras.optimizers.schedules.PolynomialDecay(**rates)
        settings = {**settings, "learning_rate": schedule}
    optimizer = make(**settings)
    variables = [tf.Variable(value, name=path) for path, value in start.items()]
    steps = []
    for grads in gradients:
        tensors = [tf.constant(g) for g in grads.values()]
        optimizer.apply_gradients(zip(tensors, variables, strict=True))
        steps.append([np.array(v) for v in variables])
    return stacked(steps)


def assert_same(ours, theirs, assert_close):
    assert len(ours) == len(theirs) >= STEPS // 5
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference, share=SHARE)


def stacked(steps):
    """Returns for each variable an array of its values at the steps to record."""
    return [np.stack(values) for values in zip(*steps[RECORDED], strict=True)]


def unstacked(variables):
    return [list(values) for values in zip(*variables, strict=True)]
