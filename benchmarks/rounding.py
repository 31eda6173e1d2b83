"""How well bfloat16 weights train with each kind of master, beside float32.

    KERAS_BACKEND=jax python -m benchmarks.rounding

trains a regression by SGD and a convnet by SGD with momentum, both like those of
Zamirai et al. (arXiv:2010.06192) in small, prints a table, and writes
`results/rounding.json`.
"""

import itertools
import statistics

import jax
import keras
import numpy as np
from keras import layers, losses
from keras.optimizers import schedules

import keras_lso
from benchmarks import evidence, machine
from examples import large_batch_digits as digits

RESULTS = evidence.RESULTS / "rounding.json"
SEEDS = (1, 2, 3)
# The dtype policy, `master_weights` and `slot_dtype`.
SETUPS = {
    "float32": ("float32", "auto", None),
    "nearest": ("bfloat16", False, None),
    "float32 masters": ("bfloat16", "float32", None),
    "remainders": ("bfloat16", "remainder", None),
    "8-bit remainders": ("bfloat16", "remainder8", None),
    "remainders, bfloat16 slots": ("bfloat16", "remainder", "bfloat16"),
    "stochastic": ("bfloat16", "stochastic", None),
    "stochastic, bfloat16 slots": ("bfloat16", "stochastic", "bfloat16"),
}


def regression(rate):
    """Ten weights between 0 and 100, an example a step, noise of variance 0.25."""

    def draw(random, steps=20_000):
        x = random.normal(size=(steps, 1, 10))
        y = x @ random.uniform(0, 100, (10, 1))
        y += random.normal(scale=0.5, size=y.shape)
        return x.astype("float32"), y.astype("float32")

    def build():
        return keras.Sequential([keras.Input((10,)), layers.Dense(1, use_bias=False)])

    return build, draw, losses.MeanSquaredError(), lambda: keras.optimizers.SGD(rate)


def convnet():
    """Scanned digits, and a rate that falls to a tenth twice."""
    x, y = digits.load_data()[0]

    def draw(random, steps=2400):
        chosen = random.integers(len(x), size=(steps, 32))
        return x[chosen], y[chosen]

    def build():
        model = digits.build_model(None)
        model.pop()  # It is float32 in each policy.
        model.add(layers.Dense(10))
        return model

    def sgd():
        rate = schedules.PiecewiseConstantDecay([1200, 1800], [0.1, 0.01, 0.001])
        return keras.optimizers.SGD(rate, momentum=0.9)

    loss_fn = losses.SparseCategoricalCrossentropy(from_logits=True)
    return build, draw, loss_fn, sgd


CONVNET = "convnet: loss"
TASKS = {f"regression, {r:g}": regression(r) for r in (0.01, 0.001)}
TASKS[CONVNET] = convnet()
FORMS = {CONVNET: "{:.5f}", "accuracy": "{:.1%}"}


def train(task, setup):
    """Yields the model and the mean loss of the last quarter, for each seed."""
    (build, draw, loss_fn, sgd), (policy, masters, slots) = task, SETUPS[setup]
    keras.config.set_dtype_policy(policy)
    model, kinds = build(), {"master_weights": masters, "slot_dtype": slots}
    optimizer = keras_lso.GuardedOptimizer(sgd(), **kinds)
    optimizer.build(model.trainable_variables)
    parts = model.trainable_variables, model.non_trainable_variables
    own = [v.value for v in optimizer.variables]

    def step(values, batch):
        (trained, fixed, own), (x, y) = values, batch

        def loss_of(trained):
            predicted, new = model.stateless_call(trained, fixed, x, training=True)
            return loss_fn(y, predicted), new

        (loss, fixed), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        trained, own = optimizer.stateless_apply(own, grads, trained)
        return (trained, fixed, own), loss

    run = jax.jit(lambda *arguments: jax.lax.scan(step, *arguments))
    for seed in SEEDS:
        # From the same weights in each set-up, which bfloat16 represents.
        keras.config.set_dtype_policy("float32")
        keras.utils.set_random_seed(seed)
        start = build().get_weights()
        model.set_weights([w.astype("bfloat16").astype("float32") for w in start])
        values = (*([v.value for v in part] for part in parts), own)
        values, found = run(values, draw(np.random.default_rng(seed)))
        for variable, value in zip(sum(parts, []), values[0] + values[1], strict=True):
            variable.assign(value)
        yield model, float(np.mean(found[-len(found) // 4 :]))


def accuracy(model):
    """Returns the share of the test images that a convnet reads right."""
    (x, _), _, (test, labels) = digits.load_data()
    digits.settle_statistics(model, x)
    return float(np.mean(np.argmax(model(test), -1) == labels))


def table(rows):
    """Returns a line for each set-up: the mean (lowest to highest) of the seeds."""
    # Results of an earlier version have fewer.
    recorded = {r["setup"] for r in rows}
    lines = [[setup] for setup in SETUPS if setup in recorded]
    for line, column in itertools.product(lines, (*TASKS, "accuracy")):
        found = [r[column] for r in rows if r["setup"] == line[0] and column in r]
        form = FORMS.get(column, "{:.2f}")
        three = [statistics.mean(found), min(found), max(found)] if found else []
        line.append("{} ({} to {})".format(*map(form.format, three)) if three else "")
    return lines


def main():
    """Trains, writes the file, and prints a table."""
    rows = []
    for setup, (column, task) in itertools.product(SETUPS, TASKS.items()):
        if column != CONVNET and SETUPS[setup][2]:
            continue  # Without momentum SGD has no slots.
        for seed, (model, loss) in zip(SEEDS, train(task, setup), strict=True):
            row = {"setup": setup, "seed": seed, column: loss}
            rows.append(
                row | ({"accuracy": accuracy(model)} if column == CONVNET else {})
            )
            print(rows[-1], flush=True)
    command = "KERAS_BACKEND=jax python -m benchmarks.rounding"
    evidence.write(RESULTS, command, machine.facts("jax"), {"rows": rows})
    for line in table(rows):
        print(*line, sep=" | ")


if __name__ == "__main__":
    main()
