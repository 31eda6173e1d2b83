"""Trains 10,000 steps with remainders, and with float32 masters; compares the numbers.

    KERAS_BACKEND=... python -m integration_tests.worker_masters NAME...

Of each optimizer that is named, of `testing.optimizers` or `ACCUMULATED`, prints a line
with the largest difference of each weight's numbers, and what of the run was as it had
to be. Half way the state goes through a file.
"""

import json
import sys
import tempfile

import keras
import numpy as np
from keras import ops

import keras_lso
from testing.optimizers import OPTIMIZERS

BACKEND = keras.backend.backend()
ACCUMULATED = "accumulated"
MAKES = {
    **OPTIMIZERS,
    ACCUMULATED: lambda rate: keras.optimizers.Adam(
        rate, gradient_accumulation_steps=3
    ),
}
SHAPES = [(3, 5), (70,)]
# A round of gradients, in which these steps overflow, and how many rounds there are.
STEPS, OVERFLOWS, ROUNDS = 100, (13, 57), 100
# Weights stay far from the numbers that are subnormal in float16.
RATE = 2.0**-13


def gradients():
    """Arrays of the gradients of a round, whose sums are 0."""
    random = np.random.default_rng(1)
    for shape in SHAPES * 2:
        of_one = random.normal(size=(STEPS, *shape))
        of_one[list(OVERFLOWS)] = 0.0
        of_one -= of_one.sum(axis=0) / (STEPS - len(OVERFLOWS))
        of_one[list(OVERFLOWS)] = np.inf
        yield of_one.astype("float32")


def new_run(make, kind):
    random = np.random.default_rng(0)
    weights = [
        keras.Variable(random.uniform(2.0, 3.0, shape).astype("float32"), dtype=dtype)
        for dtype in ("float16", "bfloat16")
        for shape in SHAPES
    ]
    optimizer = keras_lso.LossScaleOptimizer(
        make(RATE), dynamic=False, initial_scale=4.0, master_weights=kind
    )
    optimizer.build(weights)
    return weights, optimizer


# --- A round of steps on each backend -----------------------------------------------


def round_on_torch(weights, optimizer, table):
    steps = [[ops.convert_to_tensor(g[i] * 4.0) for g in table] for i in range(STEPS)]

    def run():
        for grads in steps:
            optimizer.apply(grads, weights, scaled=True)

    return run


def round_on_tensorflow(weights, optimizer, table):
    import tensorflow as tf

    table = [tf.constant(g * 4.0) for g in table]

    @tf.function(autograph=False)
    def run():
        def step(i):
            optimizer.apply([g[i] for g in table], weights, scaled=True)
            return i + 1

        tf.while_loop(lambda i: i < STEPS, step, [0], parallel_iterations=1)

    return run


def round_on_jax(weights, optimizer, table):
    import jax

    table = [g * 4.0 for g in table]

    def step(state, grads):
        trained, own = state
        return optimizer.stateless_apply(own, grads, trained, scaled=True), None

    steps = jax.jit(lambda state: jax.lax.scan(step, state, table)[0])

    def run():
        variables = optimizer.variables
        own = type(variables)([v.value for v in variables])
        trained, own = steps(([w.value for w in weights], own))
        for variable, value in zip(
            [*weights, *variables], [*trained, *own], strict=True
        ):
            variable.assign(value)

    return run


ROUND_ON = {
    "torch": round_on_torch,
    "tensorflow": round_on_tensorflow,
    "jax": round_on_jax,
}


# --- All rounds ---------------------------------------------------------------------


def stored(optimizer):
    store: dict = {}
    optimizer.save_own_variables(store)
    return [store[str(i)] for i in range(len(store))]


def resume(weights, optimizer):
    """Takes the state through a file, while the optimizer and the weights lose it."""
    values = [ops.convert_to_numpy(ops.cast(w, "float32")) for w in weights]
    with tempfile.TemporaryFile() as file:
        np.savez(file, *stored(optimizer))
        for variable in [*weights, *optimizer.variables]:
            variable.assign(ops.ones(variable.shape, dtype=variable.dtype))
        file.seek(0)
        with np.load(file) as arrays:
            store = {str(i): arrays[name] for i, name in enumerate(arrays.files)}
    for weight, value in zip(weights, values, strict=True):
        weight.assign(ops.cast(value, weight.dtype))
    optimizer.load_own_variables(store)


def train(make, kind):
    """Returns the numbers of the weights, and the counts of steps."""
    weights, optimizer = new_run(make, kind)
    run = ROUND_ON[BACKEND](weights, optimizer, list(gradients()))
    for i in range(ROUNDS):
        run()
        if i == ROUNDS // 2:
            resume(weights, optimizer)
    counts = int(optimizer.iterations), int(optimizer.skipped_steps)
    return stored(optimizer)[-len(weights) :], counts


def main(names):
    for name in names:
        ours, counts = train(MAKES[name], "remainder")
        right, same_counts = train(MAKES[name], "float32")
        assert counts == same_counts
        differences = [
            float(np.abs(a.astype("float64") - b).max())
            for a, b in zip(ours, right, strict=True)
        ]
        smallest = min(float(np.abs(n).min()) for n in right)
        print("LONG", json.dumps([name, differences, smallest, counts]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(MAKES))
