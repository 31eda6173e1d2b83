"""AdamW, LAMB and Muon at batch sizes from 32 to 2,048, on a small encoder like BERT.

Trains the encoder to fill in masked patches of handwritten digits, which scikit-learn
brings along, on 49,152 masked images at each batch size, with

- `keras.optimizers.AdamW`,
- `keras_lso.LAMB`, and
- `keras.optimizers.Muon`,

each inside `keras_lso.LossScaleOptimizer`. Run it with `make large-batch-transformer`,
or

    python examples/large_batch_transformer.py [--fast] [--output .]

It prints a table, and writes `large_batch_transformer.json` and `.png` into the output
folder. It trains on the backend in KERAS_BACKEND. `--fast` has little of everything and
proves only that it runs.

All optimizers get the same:

- data: 1,137 digits to train on, 300 to choose the learning rate by, and 360 to test
  on. Each digit to train on comes 43 times with other patches masked. A digit is a
  sentence of 16 patches of 2 x 2 pixels, a word one of nine degrees of darkness. A
  quarter of the patches is masked;
- network: two blocks of attention with layer normalization after each sum, as BERT has;
- weight decay (0.01), of kernels and embeddings only, and betas (0.9 and 0.98);
- schedule: a linear warm-up over an eighth of the images, then a linear decay. The rate
  changes every 2,048 images, which is a step at the largest batch size;
- tuning budget: six base rates, a factor of two apart, at each batch size and trained
  once each. A base rate is for 256 images and is scaled by the square root of the batch
  size, as You et al. do. The rate with most of the masked patches right is taken,
  trained from other seeds and tested.

A seed sets the initial weights, the order of the images and the masks. The lowest
of each optimizer's rates comes from a coarse search by factors of four.
"""

import argparse
import json
import pathlib
import statistics
import time
from typing import NamedTuple

import keras
import matplotlib
import numpy as np
from keras import layers, ops
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import keras_lso
from keras_lso import schedules

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ADAMW, LAMB, MUON = OPTIMIZERS = ("AdamW", "LAMB", "Muon")
LENGTH, WORDS, WIDTH, HEADS, BLOCKS = 16, 10, 32, 2, 2  # the word 0 is the mask
PIECE = 2048  # images at one learning rate
MASKED_SHARE = 0.25
PARTS = (1137, 1437)  # where those to choose a rate by begin, and those to test on
WEIGHT_DECAY, BETAS, EPSILON = 0.01, (0.9, 0.98), 1e-6
NOT_DECAYED = ["bias", "gamma", "beta"]
OUTPUT = "output"
LOWEST_BASE_RATES = {ADAMW: 2e-3, LAMB: 2.5e-3, MUON: 2e-3}  # for 256 images

# "C0" to "C2" are the first colours of matplotlib's style.
STYLES = {
    ADAMW: {"color": "C1", "marker": "o", "linestyle": "--"},
    LAMB: {"color": "C0", "marker": "s", "linestyle": "-"},
    MUON: {"color": "C2", "marker": "^", "linestyle": ":"},
}


class Settings(NamedTuple):
    batch_sizes: tuple = (32, 256, 2048)
    pieces: int = 24
    factors: tuple = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    tuning_seed: int = 0
    seeds: tuple = (1, 2, 3)


FAST = Settings((1024,), pieces=2, factors=(1.0,), seeds=(1, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="little of everything")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    results = compare(FAST if arguments.fast else Settings())
    seconds = time.perf_counter() - start
    about = {"backend": keras.backend.backend(), "seconds": round(seconds)}
    written = arguments.output / "large_batch_transformer.json"
    written.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    draw(results, written.with_suffix(".png"))
    console = Console(highlight=False)
    console.print(make_table(results))
    console.print(
        "Masked patches of the test digits that are right, in percent: mean (lowest to "
        "highest) of the seeds. Always the most frequent one, which is white, would be "
        f"{100 * results[0]['guess']:.1f}. A * marks the lowest or the highest of the "
        "rates that were tried: a better one may lie beyond.\n\n"
        f"Trained on {about['backend']}. Wrote {written} and a picture. All of it took "
        f"{about['seconds']} s."
    )


# --- Data -----------------------------------------------------------------------


def load_sentences():
    """Returns the digits as numbers from 1 to 9, in three parts."""
    images = load_digits().images.reshape(-1, 4, 2, 4, 2)
    darkness = images.sum(axis=(2, 4)).reshape(-1, LENGTH)  # of 64 at most
    words = 1 + (darkness // 8).astype("int32")
    random = np.random.default_rng(0)
    return np.split(random.permutation(words), PARTS)


def masked(sentences, copies, seed):
    """Returns masked sentences, what they were, and 1 where there is a mask."""
    random = np.random.default_rng(seed)
    words = np.concatenate([random.permutation(sentences) for _ in range(copies)])
    is_masked = random.random(words.shape) < MASKED_SHARE
    return np.where(is_masked, 0, words), words, is_masked.astype("float32")


# --- Training -------------------------------------------------------------------


def build_model():
    inputs = keras.Input((LENGTH,), dtype="int32")
    places = ops.cumsum(ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(WORDS, WIDTH)(inputs)
    x = x + layers.Embedding(LENGTH, WIDTH)(places)
    x = layers.LayerNormalization()(x)
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(2 * WIDTH, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(hidden))
    return keras.Model(inputs, layers.Dense(WORDS, dtype="float32", name=OUTPUT)(x))


def make_optimizer(name):
    if name == LAMB:
        inner = keras_lso.LAMB(
            0.0,
            *BETAS,
            EPSILON,
            weight_decay_rate=WEIGHT_DECAY,
            exclude_from_weight_decay=NOT_DECAYED,
        )
    else:
        if name == MUON:
            inner = keras.optimizers.Muon(
                0.0,
                *BETAS,
                WEIGHT_DECAY,
                EPSILON,
                WEIGHT_DECAY,
                # The biases of queries, keys and values are matrices.
                exclude_layers=["bias", OUTPUT],
            )
        else:
            inner = keras.optimizers.AdamW(0.0, WEIGHT_DECAY, *BETAS, EPSILON)
        inner.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return keras_lso.LossScaleOptimizer(inner)


def make_schedule(peak, pieces):
    """Returns the schedule, whose step is a piece of the images, from 1."""
    warmup = max(1, pieces // 8)
    decay_steps = pieces + 1 - warmup
    return schedules.WarmupStableDecay(peak, warmup, 0, decay_steps, "linear", 1e-4)


class Trial:
    """A model and an optimizer, trained from many seeds and at many learning rates."""

    def __init__(self, optimizer, batch_size, settings, sentences):
        self.batch_size, self.settings = batch_size, settings
        self.sentences, self.model = sentences, build_model()
        self.optimizer = make_optimizer(optimizer)
        self.optimizer.build(self.model.trainable_variables)
        self.fresh_state = [v.numpy().copy() for v in self.optimizer.variables]
        self.model.compile(
            self.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )

    def run(self, seed, base_rate, judged):
        """Trains new weights and returns the share of the masked patches that is right.

        Args:
            seed: Int.
            base_rate: Float, for 256 images.
            judged: Int, which part of the data it is judged by: 1 or 2.
        """
        keras.utils.set_random_seed(seed)
        self.model.set_weights(build_model().get_weights())
        for variable, value in zip(
            self.optimizer.variables, self.fresh_state, strict=True
        ):
            variable.assign(value)
        pieces = self.settings.pieces
        schedule = make_schedule(base_rate * (self.batch_size / 256) ** 0.5, pieces)
        copies = pieces * PIECE // len(self.sentences[0]) + 1
        data = masked(self.sentences[0], copies, seed)
        for i in range(pieces):
            self.optimizer.learning_rate = float(schedule(i + 1))
            self.model.fit(
                *(array[i * PIECE :][:PIECE] for array in data[:2]),
                sample_weight=data[2][i * PIECE :][:PIECE],
                batch_size=self.batch_size,
                shuffle=False,
                verbose=0,
            )
        x, y, is_masked = masked(self.sentences[judged], 4, seed=0)
        predicted = self.model.predict(x, batch_size=240, verbose=0).argmax(axis=-1)
        return float(np.average(predicted == y, weights=is_masked))


def compare(settings):
    """Returns a result for each batch size and optimizer, in this order."""
    sentences = load_sentences()
    _, y, is_masked = masked(sentences[2], 4, seed=0)
    guess = float(np.average(y == np.bincount(y.ravel()).argmax(), weights=is_masked))
    pairs = [(b, o) for b in settings.batch_sizes for o in OPTIMIZERS]
    return [
        {
            "optimizer": optimizer,
            "batch_size": batch_size,
            "steps": PIECE // batch_size * settings.pieces,
            "guess": guess,
            **study(optimizer, Trial(optimizer, batch_size, settings, sentences)),
        }
        for batch_size, optimizer in track(pairs, "batch sizes and optimizers")
    ]


def study(optimizer, trial):
    """Chooses the learning rate on the second part of the data, tests on the third."""
    settings = trial.settings
    rates = [LOWEST_BASE_RATES[optimizer] * factor for factor in settings.factors]
    found = [trial.run(settings.tuning_seed, rate, judged=1) for rate in rates]
    best = max(range(len(rates)), key=found.__getitem__)
    return {
        "base_rates": rates,
        "best": best,
        "validation": found,
        "accuracies": [trial.run(s, rates[best], judged=2) for s in settings.seeds],
    }


# --- Report ---------------------------------------------------------------------


def make_table(results):
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("batch size", "steps", "optimizer", "base rate", "right, %"):
        table.add_column(title, justify="left" if title == "optimizer" else "right")
    for result in results:
        is_first = result["optimizer"] == OPTIMIZERS[0]
        if is_first:
            table.add_section()
        is_at_edge = result["best"] in (0, len(result["base_rates"]) - 1)
        rate = result["base_rates"][result["best"]]
        found = [100 * accuracy for accuracy in result["accuracies"]]
        table.add_row(
            f"{result['batch_size']:,}" if is_first else "",
            f"{result['steps']:,}" if is_first else "",
            result["optimizer"],
            f"{rate:g}{'*' if is_at_edge else ''}",
            f"{statistics.mean(found):.1f} ({min(found):.1f} to {max(found):.1f})",
        )
    return table


def draw(results, path):
    """Draws the test accuracies, and the validation accuracies of all rates."""
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.4), layout="constrained")
    axes = axes.flat
    for optimizer, axis in zip(OPTIMIZERS, axes[1:], strict=True):
        own = [result for result in results if result["optimizer"] == optimizer]
        found = 100 * np.array([result["accuracies"] for result in own])
        axes[0].errorbar(
            [result["batch_size"] for result in own],
            found.mean(axis=1),
            yerr=[
                found.mean(axis=1) - found.min(axis=1),
                found.max(axis=1) - found.mean(axis=1),
            ],
            label=optimizer,
            capsize=4,
            **STYLES[optimizer],
        )
        for result, shade in zip(own, np.linspace(0.45, 1.0, len(own)), strict=True):
            axis.plot(
                result["base_rates"],
                100 * np.array(result["validation"]),
                color=STYLES[optimizer]["color"],
                alpha=shade,
                marker=STYLES[optimizer]["marker"],
                label=f"{result['batch_size']:,}",
            )
        set_ticks(axis, own[0]["base_rates"])
        axis.set_title(f"Tuning {optimizer}")
        axis.set_xlabel("base rate (for 256 images)")
        axis.set_ylabel("validation patches right, %")
        axis.legend(title="batch size", frameon=False)
    set_ticks(axes[0], [result["batch_size"] for result in own])
    axes[0].set_xlabel("batch size")
    axes[0].set_ylabel("masked patches right, %")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def set_ticks(axis, values):
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_xticks(values, [f"{value:,}" for value in values])


if __name__ == "__main__":
    main()
