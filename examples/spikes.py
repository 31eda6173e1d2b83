"""A Transformer that meets a few damaged batches, with a spike guard and without.

    python examples/spikes.py [--steps 320] [--seeds 3] [--output .]

One small language model is trained twice on Python's manual, from the same weights, on
the same batches in the same order, by Adam: once in a `GuardedOptimizer` alone, once
with a `SpikeGuard`. Each seed has other weights and batches. The script prints a table
and writes `spikes.png`. It draws the record of each step of the first seed with a guard
into `spikes_record.png`. It trains on the backend in KERAS_BACKEND, in about two
minutes on a CPU.

The damage. From the middle of the training on, four batches come from a damaged file,
each from a stretch of one character, over and over: those that are rarest in the text.
(The model would expect the same one again, and the second batch do less harm.) All
numbers are finite, so no check for overflows finds them. The model is sure that no such
text follows, and the gradients are many times as large as those of other batches.

The two runs. Without the guard the model learns from such a batch that every
character is followed by that one. It takes dozens of steps to unlearn, since Adam's
momentum goes on in that direction, and its second moments, which have grown, shorten
the steps that lead back. With the guard the norm of the gradients is more than six
standard deviations above those of the last steps, and the batch changes nothing.
"""

import argparse
import pathlib
import pydoc_data.topics
import time

import keras
import matplotlib
import numpy as np
from keras import layers, ops
from rich import box
from rich.console import Console
from rich.table import Table

import keras_lso

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH, BATCH_SIZE = 32, 16  # characters in a window, windows in a batch
WIDTH, HEADS, BLOCKS = 48, 4, 2
DAMAGED = 4  # batches
EVERY = 4  # steps between two looks at the loss on text that was not damaged

WITHOUT, WITH = "without a guard", "with SpikeGuard"
# "C0" and "C1" are the first colours of matplotlib's style.
STYLES = {
    WITHOUT: {"color": "C1", "linewidth": 1.8},
    WITH: {"color": "C0", "linewidth": 1.8},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=320, help="at least 20")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    damaged = damaged_steps(arguments.steps)
    seeds = range(arguments.seeds)
    runs = {
        name: [train(name, arguments.steps, damaged, seed) for seed in seeds]
        for name in STYLES
    }
    picture = arguments.output / "spikes.png"
    draw(runs, damaged, picture)
    draw_record(runs[WITH][0]["record"], arguments.output / "spikes_record.png")
    console = Console(highlight=False)
    console.print(make_table(runs))
    console.print(
        "Final loss without a guard above that with one, for each seed: "
        f"{', '.join(f'{gap:.3f}' for gap in gaps(runs)[:, -1])}. "
        f"Damaged batches: steps {', '.join(map(str, damaged))} of {arguments.steps}. "
        f"Trained on {keras.backend.backend()}. Wrote {picture}. All of it took "
        f"{time.perf_counter() - start:.0f} s."
    )


def damaged_steps(steps):
    """Returns at which steps the batches are damaged, a list."""
    middle = steps // 2
    return [middle + (steps - middle) * i // DAMAGED for i in range(DAMAGED)]


def load_text():
    """Returns Python's manual as numbers, and the size of its alphabet."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    alphabet, numbers = np.unique(list(text), return_inverse=True)
    return numbers.astype("int32"), len(alphabet)


def windows_at(starts, numbers):
    """Returns windows of the text as inputs, and each one character on as targets."""
    windows = numbers[starts[:, None] + np.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def batches(numbers, steps, damaged, seed):
    """Yields the batches of a seed."""
    random = np.random.default_rng(seed)
    rarest = np.argsort(np.bincount(numbers), kind="stable")
    for step in range(steps):
        starts = random.integers(len(numbers) - LENGTH, size=BATCH_SIZE)
        x, y = windows_at(starts, numbers)
        if step in damaged:
            x[:] = y[:] = rarest[damaged.index(step)]
        yield x, y


def build_model(characters, seed):
    """Returns a Transformer with the weights of a seed."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((LENGTH,), dtype="int32")
    places = ops.cumsum(ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(characters, WIDTH)(inputs)
    x = x + layers.Embedding(LENGTH, WIDTH)(places)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = x + attention(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="relu")(normal))
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(characters)(x))


def make_optimizer(name, steps):
    adam = keras.optimizers.Adam(2e-3)
    guard = None
    if name == WITH:
        # Half of the training is over before the first batch is damaged.
        warmup = max(2, steps // 8)
        guard = keras_lso.SpikeGuard(threshold=6.0, window=2 * warmup, warmup=warmup)
    return keras_lso.GuardedOptimizer(adam, spike_guard=guard)


def train(name, steps, damaged, seed):
    """Trains a model; returns its losses on text that was not damaged, and more."""
    numbers, characters = load_text()
    model = build_model(characters, seed)
    optimizer = make_optimizer(name, steps)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss_fn)
    optimizer.record_steps(steps)
    # All over the text. (The manual repeats itself: no part of it is new.)
    starts = np.linspace(0, len(numbers) - LENGTH - 1, 64).astype(int)
    x, y = windows_at(starts, numbers)
    losses = []
    for step, batch in enumerate(batches(numbers, steps, damaged, seed)):
        model.train_on_batch(*batch)
        if (step + 1) % EVERY == 0:
            losses.append(float(model.test_on_batch(x, y)))
    return {
        "losses": losses,
        "skipped": int(optimizer.skipped_spikes),
        "applied": int(optimizer.iterations),
        "record": optimizer.read_record(),
    }


def losses_of(runs):
    """Returns the losses of each seed, at the steps at which they were taken."""
    return np.array([run["losses"] for run in runs])


def gaps(runs):
    """Returns how far each seed without a guard is above the same one with it."""
    return losses_of(runs[WITHOUT]) - losses_of(runs[WITH])


def make_table(runs):
    title = f"A two-layer Transformer, four damaged batches, {len(runs[WITH])} seeds"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Adam", no_wrap=True)
    columns = ("highest loss\nsince the first", "final\nloss", "steps\napplied")
    for name in (*columns, "spikes\nskipped"):
        table.add_column(name, justify="right")
    for name, seeds in runs.items():
        losses = losses_of(seeds)
        table.add_row(
            name,
            f"{losses[:, losses.shape[1] // 2 :].max(axis=1).mean():.2f}",
            f"{losses[:, -1].mean():.3f}",
            str(sum(run["applied"] for run in seeds)),
            str(sum(run["skipped"] for run in seeds)),
        )
    return table


def draw(runs, damaged, path):
    """Draws the mean losses of both, the gap of each seed, and the damaged batches."""
    figure, (loss, gap) = plt.subplots(
        2, 1, figsize=(6.4, 5.2), sharex=True, layout="constrained"
    )
    steps = EVERY * np.arange(1, len(runs[WITH][0]["losses"]) + 1)
    for name, seeds in runs.items():
        loss.plot(steps, losses_of(seeds).mean(axis=0), label=name, **STYLES[name])
    for of_seed in gaps(runs):
        gap.plot(steps, of_seed, color="C1", linewidth=1.2)
    gap.axhline(0.0, color=STYLES[WITH]["color"], linewidth=1.8)
    for axis in (loss, gap):
        for i, step in enumerate(damaged):
            label = None if i else "damaged batch"
            axis.axvline(step, color="gray", linestyle=":", linewidth=1.2, label=label)
        axis.spines[["top", "right"]].set_visible(False)
    # The first steps fall from far above.
    middle = losses_of(runs[WITH]).mean(axis=0)[len(steps) // 2]
    loss.set_ylim(top=1.2 * middle)
    loss.set_ylabel("loss, nats a character\n(mean of the seeds)")
    gap.set_ylabel("without a guard,\nabove with (each seed)")
    gap.set_xlabel("step")
    loss.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_record(record, path):
    """Draws what each step of a run was."""
    keras_lso.plotting.plot_record(record).savefig(path, dpi=100)


if __name__ == "__main__":
    main()
