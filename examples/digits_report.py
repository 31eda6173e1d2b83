"""The table, the caption and the picture of `train_digits.py`."""

import math
import statistics
from statistics import fmean

import matplotlib
from rich import box
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# "C0" and "C1" are the first colours of matplotlib's style. Float32 is broad and pale:
# what lies on top of it is seen to do so.
STYLES = {
    "float32": {"color": "gray", "alpha": 0.6, "linewidth": 5},
    "float16": {"color": "C1", "linewidth": 1.8},
    "float16, keras_lso": {"color": "C0", "linewidth": 1.8},
}
LABELS = {
    "float32": "float32",
    "float16": "float16, no loss scaling",
    "float16, keras_lso": "float16, keras_lso.LossScaleOptimizer",
}
LOSS_OF_A_GUESS = (0.9**2 + 9 * 0.1**2) / 10
"""The mean squared error of giving each of the ten digits a tenth."""

ONE_DIGIT = 100 / 450
"""The points of accuracy that one test digit is worth."""
# Within it lie 95% of the values of Student's t with 3 degrees of freedom: four seeds.
T_95 = 3.182

NOTES = (
    "Accuracy is on 450 digits: the mean of the seeds, and in brackets the lowest and "
    "the highest. A seed gives all three runs the same first weights and batches. "
    "Differences are in points of accuracy, in brackets their interval: that of 95% by "
    "Student's t over the seeds, but at least one digit, 0.2 points, to each side.",
    "Flushed to zero: of the weights and biases whose gradient is not zero in "
    "float32, those where float16, at the same weights and on the same batch, makes "
    "it zero before it is unscaled; of the first seed. The picture shows the share of "
    "each layer.",
)


def make_table(runs):
    table = Table(
        title="A small LeNet on 1,797 handwritten digits: four seeds, "
        f"{runs[0]['steps']} steps",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("backend", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("test accuracy", justify="right", no_wrap=True)
    table.add_column("final\nloss", justify="right", no_wrap=True)
    table.add_column("skipped\nsteps", justify="right", no_wrap=True)
    table.add_column("flushed\nto zero", justify="right", no_wrap=True)
    for backend, own in by("backend", runs).items():
        if table.rows:
            table.add_section()
        for precision, seeds in by("precision", own).items():
            is_first = precision == "float32"
            accuracies = [run["accuracy"] for run in seeds]
            mean, low, high = fmean(accuracies), min(accuracies), max(accuracies)
            table.add_row(
                backend if is_first else "",
                precision,
                f"{mean:.1%} ({100 * low:.1f} to {100 * high:.1f})",
                f"{fmean(run['losses'][-1] for run in seeds):.4f}",
                str(sum(run["skipped"] for run in seeds)),
                "-" if is_first else f"{seeds[0]['flushed']:.1%}",
            )
    return table


def by(key, runs):
    """Returns the runs by the value that they have under a key, in their order."""
    values = dict.fromkeys(run[key] for run in runs)
    return {value: [run for run in runs if run[key] == value] for value in values}


def caption(runs):
    """Says in words what the table shows, and what its columns mean."""
    lines = []
    for backend, own in by("backend", runs).items():
        float32, plain, scaled = by("precision", own).values()
        lines += [
            f"{backend}: plain float16 against float32: {difference(plain, float32)}",
            f"{backend}: keras_lso against float32: {difference(scaled, float32)}",
        ]
    return "\n".join([*lines, "", *NOTES])


def difference(runs, others):
    """Says how two precisions differ over the seeds, in points of accuracy."""
    pairs = zip(runs, others, strict=True)
    points = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]
    mean = fmean(points)
    error = statistics.stdev(points) / math.sqrt(len(points))
    margin = max(T_95 * error, ONE_DIGIT)
    low, high = max(mean - margin, -100.0), min(mean + margin, 100.0)
    told = f"{mean:+z.1f} ({low:+z.1f} to {high:+z.1f})"
    # One digit may be more than one digit by the last bit.
    is_noise = abs(mean) < margin * 1.000001
    return f"{told}, within the noise" if is_noise else told


def draw(runs, path):
    """Draws, for each backend, the losses, the accuracies and the flushed shares."""
    backends = by("backend", runs)
    plt.rcParams.update(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(
        3,
        len(backends),
        figsize=(1.5 + 3.5 * len(backends), 8.0),
        sharey="row",
        squeeze=False,
        layout="constrained",
        height_ratios=(3, 1.5, 3),
    )
    for column, (backend, own) in zip(axes.T, backends.items(), strict=True):
        column[0].set_title(backend, fontweight="bold")
        precisions = by("precision", own)
        draw_losses(column[0], precisions)
        draw_accuracies(column[1], precisions)
        draw_flushed(column[2], precisions)
    axes[0, 0].set_ylabel("training loss")
    axes[2, 0].set_ylabel("gradient values\nflushed to zero")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside upper center", ncols=len(backends), frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_losses(axis, precisions):
    for precision, runs in precisions.items():
        losses = list(zip(*(run["losses"] for run in runs), strict=True))
        steps = [runs[0]["steps"] * (i + 1) / len(losses) for i in range(len(losses))]
        style = STYLES[precision]
        means = list(map(fmean, losses))
        axis.plot(steps, means, label=LABELS[precision], **style)
        low, high = list(map(min, losses)), list(map(max, losses))
        band = {"color": style["color"], "alpha": 0.25, "linewidth": 0}
        axis.fill_between(steps, low, high, **band)
    ink = plt.rcParams["text.color"]
    axis.axhline(LOSS_OF_A_GUESS, color=ink, linewidth=0.8, linestyle=":")
    axis.annotate(
        "guessing",
        (0.99, LOSS_OF_A_GUESS),
        xycoords=axis.get_yaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    axis.set_yscale("log")
    axis.set_xlabel("step")


def draw_accuracies(axis, precisions):
    for row, (precision, runs) in enumerate(precisions.items()):
        accuracies = [run["accuracy"] for run in runs]
        color = STYLES[precision]["color"]
        axis.plot(accuracies, [-row] * len(runs), "o", color=color, alpha=0.6)
    axis.set_yticks([0, -1, -2], ["float32", "float16", "keras_lso"])
    axis.set_ylim(-2.6, 0.6)
    axis.set_xlim(0, 1)
    axis.set_xticks([0.2, 0.4, 0.6, 0.8])
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    axis.set_xlabel("test accuracy of each seed")


def draw_flushed(axis, precisions):
    width = 0.4
    for offset, precision in (
        (-width / 2, "float16"),
        (width / 2, "float16, keras_lso"),
    ):
        layers, shares = zip(
            *precisions[precision][0]["flushed_by_layer"].items(), strict=True
        )
        color = STYLES[precision]["color"]
        positions = [i + offset for i in range(len(layers))]
        bars = axis.bar(positions, shares, width, color=color)
        labels = [f"{share:.0%}" for share in shares]
        axis.bar_label(bars, labels, fontsize=8, color=color, padding=1)
    axis.set_xticks(range(len(layers)), [name.replace(" ", "\n") for name in layers])
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
