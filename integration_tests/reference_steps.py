"""The steps that an original takes and its successor after it, from the same seed."""

import dataclasses

import keras
import numpy as np
from keras import ops

STEPS = 300
INITIAL_SCALE = 2.0**10
SHAPES = {"kernel": (3, 2), "table": (5, 2), "gain": ()}

# The name in Keras 3, and the arguments.
MOMENTUM = ("SGD", dict(learning_rate=0.05, momentum=0.9))
# The originals take 1 - beta_2 in float32, which at 0.999 is off by 1.3e-5. These have
# no rounding error.
ADAM = dict(learning_rate=0.01, beta_1=1 - 2**-3, beta_2=1 - 2**-7, epsilon=1e-7)
# Powers of two: only the sum in the momentum and that in the weight are rounded, by all
# in the same way, so the results are equal bit for bit.
EXACT = dict(learning_rate=2.0**-3, momentum=0.5)
OPTIMIZERS = {
    "sgd": ("SGD", dict(learning_rate=0.05)),
    "momentum": MOMENTUM,
    "nesterov": ("SGD", {**MOMENTUM[1], "nesterov": True}),
    "exact": ("SGD", EXACT),
    "adam": ("Adam", ADAM),
    "amsgrad": ("Adam", {**ADAM, "amsgrad": True}),
    # The epsilon is outside the root in 2.0 to 2.10, inside in Keras 3: tiny here.
    "rmsprop": ("RMSprop", dict(learning_rate=0.01, epsilon=1e-12)),
    "centered": ("RMSprop", dict(learning_rate=0.01, momentum=0.9, centered=True)),
    "adagrad": ("Adagrad", dict(learning_rate=0.1)),
    "adamax": ("Adamax", dict(learning_rate=0.01)),
}


@dataclasses.dataclass
class Rows:
    """A sparse gradient."""

    values: np.ndarray
    indices: np.ndarray
    shape: tuple

    def dense(self):
        dense = np.zeros(self.shape, "float32")
        np.add.at(dense, self.indices, self.values)
        return dense


def tensor_of_tensorflow(grad):
    import tensorflow as tf

    if not isinstance(grad, Rows):
        return grad if grad is None else tf.constant(grad)
    return tf.IndexedSlices(
        tf.constant(grad.values),
        tf.constant(grad.indices),
        tf.constant(grad.shape, dtype="int64"),
    )


def tensor(grad):
    """Returns the gradient as the backend under test has it."""
    if not isinstance(grad, Rows):
        return grad if grad is None else ops.array(grad)
    if keras.backend.backend() == "tensorflow":
        return tensor_of_tensorflow(grad)
    if keras.backend.backend() == "jax":
        from jax.experimental import sparse

        # Keras cannot find out inside of a jit.
        return sparse.BCOO(
            (ops.array(grad.values), ops.array(grad.indices)[:, None]),
            shape=grad.shape,
            unique_indices=len(set(grad.indices)) == len(grad.indices),
        )
    return ops.array(grad.dense())


def number(value):
    return np.array(ops.convert_to_numpy(value)).item()


def start():
    random = np.random.default_rng(0)
    return {n: random.standard_normal(s).astype("float32") for n, s in SHAPES.items()}


def constant_step(value):
    """Returns a step with gradients that are all this number."""
    grads = {n: np.full(s, value, "float32") for n, s in SHAPES.items()}
    return bool(np.isfinite(value)), grads


def make_script(growth, all_rows=False, overflows=True):
    """Returns STEPS pairs: are the gradients finite, and the gradients.

    Overflows come so often that the scale moves both ways, and stays between 2 and
    2**23, where the bounds of neither class matter.
    """
    random = np.random.default_rng(growth)
    steps, exponent, good_steps = [], np.log2(INITIAL_SCALE), 0
    for step in range(STEPS):
        # The first is finite: the originals make their slots in it, ours in `build`.
        finite = step == 0 or not overflows or random.random() > 1 / (growth + 1)
        if overflows and not 2 <= exponent <= 22:
            finite = exponent < 2
        is_plain = step == 0 or random.random() < 0.5
        grads = finite_gradients(random, is_plain, all_rows)
        if not finite:
            poison(random, grads)
        steps.append((finite, grads))
        good_steps = good_steps + 1 if finite else 0
        if not finite:
            exponent -= 1
        elif good_steps == growth:
            exponent, good_steps = exponent + 1, 0
    return steps


def finite_gradients(random, is_plain, all_rows):
    """Returns a dict of dense gradients, or of a dense one, a sparse one and None.

    Two kinds and no more, because each is compiled.
    """
    grads = {}
    for name, shape in SHAPES.items():
        size = np.float32(2.0 ** random.integers(-3, 2))
        grads[name] = size * random.standard_normal(shape).astype("float32")
    if not is_plain:
        rows = len(grads["table"])
        indices = random.permutation(rows)[: rows if all_rows else 2]
        grads["table"] = Rows(grads["table"][indices], indices, SHAPES["table"])
        grads["kernel"] = None
    return grads


def poison(random, grads):
    """Overwrites an element of one gradient."""
    name = random.choice([name for name in grads if grads[name] is not None])
    is_sparse = isinstance(grads[name], Rows)
    values = np.array(grads[name].values if is_sparse else grads[name])
    element = tuple(random.integers(n) for n in values.shape)
    values[element] = random.choice([np.inf, -np.inf, np.nan])
    grads[name] = (
        dataclasses.replace(grads[name], values=values) if is_sparse else values
    )


def targets():
    """Returns the targets of four weights in a float16 loss, for each of its steps."""
    random = np.random.default_rng(0)
    return [random.standard_normal(4).astype("float16") for _ in range(STEPS // 3)]
