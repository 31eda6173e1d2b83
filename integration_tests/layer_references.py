"""The same gradients for ours and for a reference, of layers of every kind.

What `test_lars.py`, `test_lamb.py` and `test_novograd.py` share. Largest difference
allowed, after each of 50 steps, or each fifth one where the reference's are recorded:
2e-6 of the tensor's largest magnitude. Rounding of a step is 6e-8 of it at most; sums
of squares in another order add as much to a trust ratio.
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
WITHOUT_GRADIENT = ("dense/kernel", "dense")  # |g| is 0


def make_start(shapes=SHAPES):
    """Returns the weights by their paths."""
    random = np.random.default_rng(1)
    return {
        path: np.zeros(shape, "float32")
        if path in ZERO_AT_FIRST
        else random.standard_normal(shape).astype("float32")
        for path, shape in shapes.items()
    }


def make_gradients(shapes=SHAPES, zero_at=0):
    """Returns the gradients of each step; those of some are 0 at every third step."""
    random = np.random.default_rng(2)
    return [
        {
            path: np.float32(10.0 ** random.integers(-3, 3))
            * random.standard_normal(shape).astype("float32")
            * np.float32(not (path in WITHOUT_GRADIENT and step % 3 == zero_at))
            for path, shape in shapes.items()
        }
        for step in range(STEPS)
    ]


def make_variables(start):
    variables = []
    for path, value in start.items():
        *scopes, name = path.split("/")
        with keras.name_scope(scopes[0] if scopes else "top"):
            variables.append(keras.Variable(value, name=name))
    return variables


def trajectory(optimizer, shapes=SHAPES, zero_at=0):
    """Returns the weights after each step of ours."""
    variables = make_variables(make_start(shapes))
    scale = float(getattr(optimizer, "loss_scale", 1.0))
    steps = []
    for grads in make_gradients(shapes, zero_at):
        optimizer.apply([ops.array(g * scale) for g in grads.values()], variables)
        steps.append([np.array(ops.convert_to_numpy(v)) for v in variables])
    return steps


def by_model_garden(load, settings, rates=None):
    """Returns what takes the steps by a class of the Model Garden's, for a record."""

    def run():
        import tensorflow as tf
        import tf_keras

        schedule = {}
        if rates is not None:
            decay = tf_keras.optimizers.schedules.PolynomialDecay(**rates)
            schedule["learning_rate"] = decay
        optimizer = load()(**settings, **schedule)
        start = make_start()
        variables = [tf.Variable(value, name=path) for path, value in start.items()]
        steps = []
        for grads in make_gradients():
            tensors = [tf.constant(g) for g in grads.values()]
            optimizer.apply_gradients(zip(tensors, variables, strict=True))
            steps.append([np.array(v) for v in variables])
        return stacked(steps)

    return run


def by_optax(name, rate, shapes=SHAPES, zero_at=0, **settings):
    """Returns what takes the steps by an optimizer of optax's, for a record."""

    def run():
        import jax
        import optax

        optimizer = getattr(optax, name)(rate, **settings)
        weights = jax.tree.map(jax.numpy.asarray, make_start(shapes))
        state = optimizer.init(weights)
        steps = []
        for grads in make_gradients(shapes, zero_at):
            grads = jax.tree.map(jax.numpy.asarray, grads)
            updates, state = optimizer.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            steps.append([np.asarray(weights[path]) for path in shapes])
        return stacked(steps)

    return run


def stacked(steps):
    """Returns for each variable an array of its values at the steps to record."""
    return [np.stack(values) for values in zip(*steps[RECORDED], strict=True)]


def assert_same(ours, theirs, assert_close):
    assert len(ours) == len(theirs) >= STEPS // 5
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference, share=SHARE)


def assert_as_recorded(ours, record, assert_close):
    """Compares the weights after each step of ours with what `stacked` returned."""
    theirs = [list(values) for values in zip(*record, strict=True)]
    assert_same(ours[RECORDED], theirs, assert_close)
