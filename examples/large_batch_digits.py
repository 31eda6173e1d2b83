"""SGD against LARS at growing batch sizes, on real handwritten digits, in float16.

Trains a small convolutional network on scikit-learn's 1,797 scanned digits for the
same number of epochs at each batch size, up to one batch of all the images that it
trains on, with

- SGD with Nesterov momentum, and
- `keras_lso.LARS`,

each inside `keras_lso.LossScaleOptimizer`. Run it with `make large-batch`, or

    python examples/large_batch_digits.py [--fast] [--output .]

It prints a table and writes `large_batch.png` into the output folder. It trains on
the backend named in KERAS_BACKEND, or else on the first installed of JAX, TensorFlow
and PyTorch. `--fast` uses little of everything and proves only that it runs.

Both optimizers get the same:

- data: 1,152 digits to train on, 285 to choose the learning rate by, 360 to test on;
- network, L2 penalty on the kernels (2e-4) and momentum (0.9);
- schedule: a linear warm-up over the first sixth of the steps, then a decay to zero
  by the power of 2;
- tuning budget: nine base learning rates, a factor of two apart, at each batch size
  and trained once each. A base rate is for 256 images and is scaled linearly to the
  batch size. The rate with the most validation digits right is taken (in a tie, the
  one with the lower cross-entropy), trained from three other seeds and tested.

A seed sets the initial weights and the order of the images. The test images are
looked at by those three runs only. The middle of each optimizer's nine rates comes
from a coarse search by factors of four, at all batch sizes, on validation digits too.

Batch normalization is judged with the statistics of all the training images, taken
by one forward pass after the training ("precise BN", arXiv:2105.07576). The moving
average that a layer keeps is always some steps late. In 1,080 small steps that does
not matter; in 30 large ones it does, and more so for LARS, which moves every layer by
a share of its norm whatever the gradient.
"""

import argparse
import importlib.util
import os
import pathlib
import statistics
import sys
import time
from typing import NamedTuple

if "KERAS_BACKEND" not in os.environ:
    # The fastest at so small a task first.
    names = ("jax", "tensorflow", "torch")
    installed = [name for name in names if importlib.util.find_spec(name)]
    if not installed:
        sys.exit(f"None of {', '.join(names)} is installed: nothing to train with.")
    os.environ["KERAS_BACKEND"] = installed[0]

import keras
import matplotlib
import numpy as np
from keras import layers
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_lso
from keras_lso import schedules

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SGD, LARS = OPTIMIZERS = ("SGD, Nesterov", "LARS")
TRAINING_IMAGES = 1152
JUDGED_AT_ONCE = 15  # divides both 285 and 360: one compiled program for both
WEIGHT_DECAY = 2e-4
MOMENTUM = 0.9
MIDDLE_BASE_RATES = {SGD: 0.4, LARS: 16.0}  # for 256 images

# "C0" and "C1" are the first colours of matplotlib's style.
STYLES = {
    SGD: {"color": "C1", "marker": "o", "linestyle": "--"},
    LARS: {"color": "C0", "marker": "s", "linestyle": "-"},
}


FACTORS = tuple(2.0**i for i in range(-4, 5))


class Settings(NamedTuple):
    batch_sizes: tuple = (32, 128, 384, TRAINING_IMAGES)
    epochs: int = 30
    factors: tuple = FACTORS
    tuning_seed: int = 0
    seeds: tuple = (1, 2, 3)

    @property
    def runs(self):
        runs_of_one = len(self.factors) + len(self.seeds)
        return len(OPTIMIZERS) * len(self.batch_sizes) * runs_of_one


FAST = Settings(batch_sizes=(384,), epochs=8, factors=(0.5, 1.0), seeds=(1, 2))


def main():
    arguments = parse_arguments()
    settings = FAST if arguments.fast else Settings()
    console = Console()
    start = time.perf_counter()
    results = compare(settings, console)
    picture = arguments.output / "large_batch.png"
    draw(results, picture)
    console.print(make_table(results, settings))
    console.print(caption(results, settings), highlight=False)
    seconds = time.perf_counter() - start
    console.print(
        f"\nTrained on {keras.backend.backend()}. Wrote {picture}. All of it took "
        f"{seconds:.0f} s.",
        highlight=False,
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="little of everything")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments


# --- Training -------------------------------------------------------------------


def load_data():
    """Returns images and labels to train on, to choose a rate by, and to test on."""
    digits = load_digits()
    images = (digits.images / 16).astype("float32")[..., None]
    rest, test_x, rest_y, test_y = train_test_split(
        images, digits.target, test_size=360, stratify=digits.target, random_state=0
    )
    train_x, valid_x, train_y, valid_y = train_test_split(
        rest, rest_y, train_size=TRAINING_IMAGES, stratify=rest_y, random_state=0
    )
    return (train_x, train_y), (valid_x, valid_y), (test_x, test_y)


def build_model(penalty):
    def convolution(filters, strides=1):
        return [
            layers.Conv2D(
                filters,
                3,
                strides,
                padding="same",
                use_bias=False,
                kernel_regularizer=penalty,
            ),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *convolution(16),
            *convolution(32, strides=2),
            *convolution(32, strides=2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, dtype="float32", kernel_regularizer=penalty),
        ]
    )


def settle_statistics(model, images):
    """Gives batch normalization the statistics of all these images, not an average."""
    normalizations = [
        layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)
    ]
    momenta = [layer.momentum for layer in normalizations]
    for layer in normalizations:
        layer.momentum = 0.0
    model(images, training=True)
    for layer, momentum in zip(normalizations, momenta, strict=True):
        layer.momentum = momentum


def make_schedule(base_rate, batch_size, epochs):
    steps = TRAINING_IMAGES // batch_size * epochs
    warmup_steps = max(1, round(steps / 6))
    rate = schedules.linear_scaling(base_rate, batch_size)
    warmup = schedules.LinearWarmup(rate, warmup_steps)
    decay = keras.optimizers.schedules.PolynomialDecay(
        rate, steps - warmup_steps, end_learning_rate=0.0, power=2.0
    )
    return schedules.JoinedSchedules([warmup, decay], [warmup_steps])


class Trial:
    """A model, an optimizer and a learning rate, to be trained from several seeds."""

    def __init__(self, optimizer, batch_size, base_rate, epochs):
        self.base_rate, self.batch_size, self.epochs = base_rate, batch_size, epochs
        schedule = make_schedule(base_rate, batch_size, epochs)
        # LARS has to see the gradient of the penalty apart; SGD need not.
        self.penalty = None
        if optimizer == SGD:
            self.penalty = keras.regularizers.L2(WEIGHT_DECAY / 2)
            inner = keras.optimizers.SGD(schedule, momentum=MOMENTUM, nesterov=True)
        else:
            inner = keras_lso.LARS(
                schedule,
                momentum=MOMENTUM,
                weight_decay_rate=WEIGHT_DECAY,
                exclude_1d=True,
            )
        self.model = build_model(self.penalty)
        self.optimizer = keras_lso.LossScaleOptimizer(inner)
        self.optimizer.build(self.model.trainable_variables)
        self.fresh_state = [v.numpy().copy() for v in self.optimizer.variables]
        self.model.compile(
            self.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[
                "accuracy",
                # The loss without the penalty.
                keras.metrics.SparseCategoricalCrossentropy(
                    from_logits=True, name="cross_entropy"
                ),
            ],
        )

    def run(self, seed, train_data, judge_data):
        """Trains from a seed, from new weights, and returns the result.

        Giving new weights to a compiled model takes almost no time.
        """
        keras.utils.set_random_seed(seed)
        self.model.set_weights(build_model(self.penalty).get_weights())
        for variable, value in zip(
            self.optimizer.variables, self.fresh_state, strict=True
        ):
            variable.assign(value)
        history = self.model.fit(
            *train_data, batch_size=self.batch_size, epochs=self.epochs, verbose=0
        )
        settle_statistics(self.model, train_data[0])
        judged = self.model.evaluate(
            *judge_data, batch_size=JUDGED_AT_ONCE, verbose=0, return_dict=True
        )
        return {
            "accuracy": judged["accuracy"],
            "cross_entropy": judged["cross_entropy"],
            "training_loss": history.history["cross_entropy"][-1],
            "skipped": int(self.optimizer.skipped_steps),
        }


def compare(settings, console):
    """Returns a result for each batch size and optimizer, in this order."""
    keras.config.set_dtype_policy("mixed_float16")
    data = load_data()
    columns = (
        "{task.description:<29}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=settings.runs)
        results = []
        for batch_size in settings.batch_sizes:
            for optimizer in OPTIMIZERS:
                text = f"{optimizer}, batches of {batch_size:,}"
                progress.update(task, description=text)
                results.append(
                    study(
                        optimizer,
                        batch_size,
                        settings,
                        data,
                        lambda: progress.advance(task),
                    )
                )
    return results


def study(optimizer, batch_size, settings, data, tell):
    """Chooses the learning rate on the validation images, then tests it."""
    train_data, valid_data, test_data = data
    trials, tuning = [], []
    for factor in settings.factors:
        base_rate = MIDDLE_BASE_RATES[optimizer] * factor
        trials.append(Trial(optimizer, batch_size, base_rate, settings.epochs))
        tuning.append(trials[-1].run(settings.tuning_seed, train_data, valid_data))
        tell()
    best = max(range(len(trials)), key=lambda i: merit(tuning[i]))
    tested = []
    for seed in settings.seeds:
        tested.append(trials[best].run(seed, train_data, test_data))
        tell()
    return {
        "optimizer": optimizer,
        "batch_size": batch_size,
        "steps": TRAINING_IMAGES // batch_size * settings.epochs,
        "base_rates": [trial.base_rate for trial in trials],
        "best": best,
        "validation": [run["accuracy"] for run in tuning],
        "accuracies": [run["accuracy"] for run in tested],
        "training_loss": statistics.mean(run["training_loss"] for run in tested),
        "skipped": [run["skipped"] for run in tested],
    }


def merit(run):
    return run["accuracy"], -np.nan_to_num(run["cross_entropy"], nan=np.inf)


# --- Report ---------------------------------------------------------------------


def make_table(results, settings):
    table = Table(
        title=f"1,152 handwritten digits, {settings.epochs} epochs, float16",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("batch\nsize", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("optimizer", no_wrap=True)
    table.add_column("base\nrate", justify="right", no_wrap=True)
    table.add_column("peak\nrate", justify="right")
    table.add_column("test accuracy\nmean (min to max)", justify="right", no_wrap=True)
    table.add_column("train\nloss", justify="right")
    table.add_column("skipped\nsteps", justify="right")
    for result in results:
        is_first = result["optimizer"] == OPTIMIZERS[0]
        if is_first and table.rows:
            table.add_section()
        base_rate = result["base_rates"][result["best"]]
        accuracies = result["accuracies"]
        table.add_row(
            f"{result['batch_size']:,}" if is_first else "",
            f"{result['steps']:,}" if is_first else "",
            result["optimizer"],
            f"{base_rate:g}{'*' if at_the_edge(result) else ''}",
            f"{schedules.linear_scaling(base_rate, result['batch_size']):.3g}",
            f"{100 * statistics.mean(accuracies):.1f} "
            f"({100 * min(accuracies):.1f} to {100 * max(accuracies):.1f})",
            f"{result['training_loss']:.1g}",
            str(sum(result["skipped"])),
        )
    return table


def at_the_edge(result):
    return result["best"] in (0, len(result["base_rates"]) - 1)


def caption(results, settings):
    """Says in words what the table shows, and what others have found."""
    lines = [
        compare_in_words(sgd, lars)
        for sgd, lars in zip(results[::2], results[1::2], strict=True)
    ]
    lines += [
        "",
        f"Test accuracy in percent, on 360 digits (one is 0.28), mean and range of "
        f"{len(settings.seeds)} seeds; skipped steps are of all of them. The base rate "
        f"is the best of {len(settings.factors)} on validation digits, for 256 images; "
        "the peak rate is what linear scaling makes of it. The training loss is the "
        "cross-entropy in the last epoch. So few seeds understate the spread: another "
        "backend draws other random numbers, and its rows may fall the other way.",
    ]
    if any(at_the_edge(result) for result in results):
        lines.append(
            "* The lowest or highest of the rates tried: a better one may lie beyond."
        )
    lines += [
        "",
        "What others found. You, Gitman, Ginsburg (arXiv:1708.03888): with LARS, "
        "AlexNet trains at batch 8K and ResNet-50 at 32K without loss in accuracy. "
        "Nado et al. (arXiv:2102.06356): Nesterov momentum and Adam, tuned as well, "
        "match or exceed LARS and LAMB at such batch sizes. A small network on small "
        "images decides nothing between them.",
    ]
    return "\n".join(lines)


def compare_in_words(sgd, lars):
    gain = statistics.mean(lars["accuracies"]) - statistics.mean(sgd["accuracies"])
    points = f"{abs(100 * gain):.1f}"
    if points == "0.0":
        words = "equals SGD"
    else:
        side = "above" if gain > 0 else "below"
        words = f"is {points} points {side} SGD"
    overlap = min(max(sgd["accuracies"]), max(lars["accuracies"])) >= max(
        min(sgd["accuracies"]), min(lars["accuracies"])
    )
    return (
        f"Batches of {sgd['batch_size']:,}: LARS {words}; their ranges "
        f"{'overlap' if overlap else 'do not overlap'}."
    )


def draw(results, path):
    """Draws the test accuracies, and the validation accuracies of all rates."""
    plt.rcParams.update(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplot_mosaic(
        [["test", SGD], ["test", LARS]],
        figsize=(9.5, 5.0),
        width_ratios=(1.15, 1),
        layout="constrained",
    )
    for optimizer, shift in zip(OPTIMIZERS, (0.96, 1.04), strict=True):
        own = [result for result in results if result["optimizer"] == optimizer]
        draw_test(axes["test"], optimizer, own, shift)
        draw_validation(axes[optimizer], optimizer, own)
    # Above the axes, where no data can lie.
    axes["test"].legend(
        frameon=False,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
        handlelength=3.5,
    )
    axes[SGD].legend(title="batch size", frameon=False, loc="lower left", fontsize=9)
    axes[LARS].set_xlabel("base learning rate (for 256 images)")
    figure.savefig(path, dpi=200)
    plt.close(figure)


def draw_test(axis, optimizer, results, shift):
    batch_sizes = [result["batch_size"] for result in results]
    accuracies = np.array([result["accuracies"] for result in results])
    lowest, highest = accuracies.min(axis=1), accuracies.max(axis=1)
    # The mean of three equal numbers may be rounded to another one.
    means = accuracies.mean(axis=1).clip(lowest, highest)
    axis.errorbar(
        # Side by side, so that one does not hide the other.
        [shift * size for size in batch_sizes],
        means,
        yerr=[means - lowest, highest - means],
        label=optimizer,
        capsize=4,
        linewidth=1.8,
        markersize=6,
        **STYLES[optimizer],
    )
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_xticks(
        batch_sizes,
        [f"{r['batch_size']:,}\n({r['steps']:,} steps)" for r in results],
    )
    axis.set_xlabel("batch size")
    axis.set_ylabel("test accuracy (mean, lowest and highest of the seeds)")
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=1))


def draw_validation(axis, optimizer, results):
    # Without its darkest ones, which a dark background would hide.
    shades = matplotlib.colormaps["viridis"]
    for i, result in enumerate(results):
        rates, accuracies = result["base_rates"], result["validation"]
        color = shades(0.3 + 0.55 * i / max(1, len(results) - 1))
        label = f"{result['batch_size']:,}"
        axis.plot(rates, accuracies, color=color, marker="osD^"[i], ms=4, label=label)
        chosen = rates[result["best"]], accuracies[result["best"]]
        axis.plot(*chosen, "o", color=color, ms=11, fillstyle="none", clip_on=False)
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    # What falls out of the picture has failed to learn.
    axis.set_ylim(0.88, 1.0)
    axis.set_title(f"Tuning {optimizer}: the chosen rates are circled", fontsize=10)
    axis.set_ylabel("validation accuracy")
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))


if __name__ == "__main__":
    main()
