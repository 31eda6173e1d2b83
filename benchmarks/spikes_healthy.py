"""How often a spike guard skips a good step, and what that does to the final loss.

    KERAS_BACKEND=jax python -m benchmarks.spikes_healthy [--steps 1200]

trains the Transformer of `examples/transformer_char.py` and the convnet of
`examples/large_batch_digits.py` by Adam, at three rates, each with a warm-up and a
cosine decay. It prints a table, and writes `results/spikes_healthy.json`.

The healthy runs have no guard, and each rule says which of their steps it would skip.
Then the batches of the first seed train a model under each rule: once as they are, and
once with four damaged ones among them, which are zeros, also as targets.
"""

import argparse
import functools
import itertools

import jax
import keras
import numpy as np
from keras import ops

import keras_lso
from benchmarks import evidence, machine
from examples import large_batch_digits as digits
from examples import transformer_char
from examples.spikes import damaged_steps
from testing.spikes import Model, by_peer

RESULTS = evidence.RESULTS / "spikes_healthy.json"
RATES = (1e-3, 3e-3, 1e-2)
WARMUP_SHARE = 0.1  # of the steps, in which the rate rises
NO_GUARD, OURS, PEER, CLIP = "no guard", "SpikeGuard", "OLMo-core", "global_clipnorm=1"
THRESHOLDS = {f"{rule}, {t}": float(t) for rule in (OURS, PEER) for t in (4, 6, 8)}
# OLMo-core's default threshold only: its judge looks at the whole window each step.
RULES = [NO_GUARD, *(f"{OURS}, {t}" for t in (4, 6, 8)), f"{PEER}, 6", CLIP]
# The losses of the Transformer and of the convnet, with healthy and damaged batches.
COLUMNS = ("rule", "Transformer", "convnet", "damaged skipped", *("final loss",) * 4)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def transformer():
    """Returns a model of Python's manual, its batches, inputs, and what judges it."""
    text = transformer_char.load_text()
    alphabet, numbers = np.unique(list(text), return_inverse=True)
    numbers, end = numbers.astype("int32"), len(numbers) - transformer_char.LENGTH

    def draw(random):
        return transformer_char.windows_at(random.integers(end, size=8), numbers)

    starts = np.linspace(0, end - 1, 1024).astype(int)
    x, y = transformer_char.windows_at(starts, numbers)
    build = functools.partial(transformer_char.build_model, "float32", len(alphabet))
    return build, draw, x[:1], (x, y)


def convnet():
    """Returns the same for scanned digits, which the test images judge."""
    (x, y), _, test = digits.load_data()

    def draw(random):
        chosen = random.integers(len(x), size=32)
        return x[chosen], y[chosen]

    return functools.partial(digits.build_model, None), draw, x, test


TASKS = {"Transformer": (transformer, 8), "convnet": (convnet, 20)}  # and their seeds


class Trainer:
    """A model and a rule, compiled once for all rates and seeds."""

    def __init__(self, task, rule, steps):
        build, self.draw, self.inputs, (self.x, self.y) = task
        self.rule, self.steps = rule, steps
        keras.utils.set_random_seed(0)
        clip_norm = 1.0 if rule == CLIP else None
        adam = keras.optimizers.Adam(global_clipnorm=clip_norm, name="adam")
        is_ours = rule.startswith(OURS)
        guard = keras_lso.SpikeGuard(THRESHOLDS[rule]) if is_ours else None
        self.model = build()
        self.optimizer = keras_lso.GuardedOptimizer(adam, spike_guard=guard)
        self.optimizer.build(self.model.trainable_variables)
        own = self.optimizer.variables
        model = (self.model.trainable_variables, self.model.non_trainable_variables)
        self.variables = (*model, own)
        self.first = [[v.numpy() for v in variables] for variables in self.variables]
        paths = [v.path.rpartition("adam/")[2] for v in own]
        self.rate, self.applied = map(paths.index, ("learning_rate", "iteration"))
        self.step = jax.jit(self._step)

    def _step(self, trained, fixed, own, x, y):
        """Returns the loss, the norm of the gradients, and all new values."""

        def loss_of(trained):
            logits, new = self.model.stateless_call(trained, fixed, x, training=True)
            return loss_fn(y, logits), new

        (loss, fixed), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in grads))
        trained, own = self.optimizer.stateless_apply(own, grads, trained)
        return loss, norm, [trained, fixed, own]

    def run(self, rate, seed, damaged=()):
        """Returns a row of the results, and the losses and norms of the steps."""
        random = np.random.default_rng(seed)
        values, losses, norms, skipped = self.first, [], [], []
        for step in range(self.steps):
            share = (step + 1) / self.steps
            curve = min(share / WARMUP_SHARE, np.cos(np.pi / 2 * share) ** 2)
            values[2][self.rate] = np.float32(rate * curve)
            batch = self.draw(random)
            if step in damaged:
                batch = [np.zeros_like(array) for array in batch]
            loss, norm, new = self.step(*values, *batch)
            losses.append(float(loss))
            norms.append(float(norm))
            is_applied = new[2][self.applied] > values[2][self.applied]
            if self.rule.startswith(PEER):
                # The last decision needs no more than a window and the step itself.
                is_applied = would_apply(self.rule, losses[-129:], norms[-129:])[-1]
            if is_applied or not self.rule.startswith(PEER):
                values = new  # A `SpikeGuard` keeps the weights, and the norm.
            if not is_applied:
                skipped.append(step)
        good, bad = set(skipped) - set(damaged), set(skipped) & set(damaged)
        row = {"rate": rate, "seed": seed, "rule": self.rule, "damaged": bool(damaged)}
        row |= {"good_skipped": len(good), "damaged_skipped": len(bad)}
        row["final_loss"] = round(self.final_loss(values), 5)
        return row, losses, norms

    def final_loss(self, values):
        """Returns the loss of what judges the model."""
        for variables, arrays in zip(self.variables[:2], values[:2], strict=True):
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)
        digits.settle_statistics(self.model, self.inputs)
        return float(loss_fn(self.y, self.model(self.x)))


def would_apply(rule, losses, norms):
    """Returns which steps of a run a rule applies, or does not clip."""
    if rule == CLIP:
        return np.array(norms) <= 1.0
    if rule.startswith(OURS):
        return list(map(Model(keras_lso.SpikeGuard(THRESHOLDS[rule])).applies, norms))
    judge = functools.partial(by_peer, PEER, threshold=THRESHOLDS[rule])
    return np.logical_and(judge(losses)[0], judge(norms)[0])


def train(steps):
    """Yields the results: a dict for each run."""
    damaged = damaged_steps(steps)
    tasks = {name: make() for name, (make, _) in TASKS.items()}
    healthy = {}  # the first seed's rows without a guard
    for rule, (name, task) in itertools.product(RULES, tasks.items()):
        trainer = Trainer(task, rule, steps)
        for rate in RATES:
            yield {"model": name} | trainer.run(rate, 0, damaged)[0]
            if rule == NO_GUARD:
                for seed in reversed(range(TASKS[name][1])):
                    row, losses, norms = trainer.run(rate, seed)
                    row["would_skip"] = {
                        r: steps - int(np.sum(would_apply(r, losses, norms)))
                        for r in (*THRESHOLDS, CLIP)
                    }
                    yield {"model": name} | row
                healthy[name, rate] = row, row.pop("would_skip")
                continue
            row, would_skip = healthy[name, rate]
            # Without a skip the run would be the same.
            row = trainer.run(rate, 0)[0] if would_skip[rule] else row | {"rule": rule}
            yield {"model": name} | row


def table(results):
    """Returns a row of text for each rule: shares of steps and mean final losses."""
    lines = []
    for rule in RULES:
        shares, caught, losses = [], 0, []
        for model in TASKS:
            rows = [row for row in results["rows"] if row["model"] == model]
            skips = [r["would_skip"].get(rule, 0) for r in rows if "would_skip" in r]
            shares.append(f"{np.mean(skips) / results['steps']:.2%}")
            rows = [row for row in rows if (row["rule"], row["seed"]) == (rule, 0)]
            caught += sum(row["damaged_skipped"] for row in rows)
            for is_damaged in (False, True):
                found = [r["final_loss"] for r in rows if r["damaged"] == is_damaged]
                losses.append(f"{np.mean(found):.3f}")
        lines.append([rule, *shares, str(caught), *losses])
    return lines


def main():
    """Trains, writes the file, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200, help="at least 20")
    steps = parser.parse_args().steps
    results = {"steps": steps, "rows": []}
    for row in train(steps):
        results["rows"].append(row)
        print(*row.values(), flush=True)
    command = f"KERAS_BACKEND=jax python -m benchmarks.spikes_healthy --steps {steps}"
    evidence.write(RESULTS, command, machine.facts("jax"), results)
    for line in (COLUMNS, *table(results)):
        print(*line, sep=" | ")


if __name__ == "__main__":
    main()
