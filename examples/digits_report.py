"""The table, the caption and the picture of `train_digits.py`."""

import math

import matplotlib
from rich import box
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# "C0" and "C1" are the first colours of matplotlib's style. Float32 is broad and pale:
# what lies on top of it is seen to do so.
STYLES = {
    "float32": {"color": "gray", "alpha": 0.5, "linewidth": 5},
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

NOTES = (
    "Accuracy is on 450 digits, in percentage points: one digit is 0.2.",
    "Flushed to zero: of the weights and biases whose gradient is not zero in "
    "float32, those where float16, at the same weights and on the same batch, makes "
    "it zero before it is unscaled; over the whole run. Most weights are in the dense "
    "layers, near the loss; the picture shows the share of each layer.",
    "Why float16 does that here: a squared error averaged over 4,490 terms, a "
    "softmax, four sigmoids and two average poolings each make the gradient smaller "
    "on its way to the first layer, until it is below 6e-8, the smallest number that "
    "float16 has. The docstring of examples/train_digits.py has the sums.",
)


def make_table(runs):
    table = Table(
        title="LeNet-5 on 1,797 handwritten digits",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("backend", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("test\naccuracy", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("skipped\nsteps", justify="right")
    table.add_column("final\nscale", justify="right")
    table.add_column("gradient\nvalues\nflushed\nto zero", justify="right")
    for run in runs:
        is_first = run["precision"] == "float32"
        if is_first and table.rows:
            table.add_section()
        table.add_row(
            run["backend"] if is_first else "",
            run["precision"],
            f"{run['accuracy']:.1%}",
            str(len(run["scales"])),
            str(len(run["skipped"])),
            "-" if run["final_scale"] == 1 else f"2^{math.log2(run['final_scale']):g}",
            "-" if is_first else f"{run['flushed']:.1%}",
        )
    return table


def caption(runs):
    """Says in words what the table shows, and what its last column means."""
    differences = [
        f"{float32['backend']}: against float32, plain float16 "
        f"{difference(plain['accuracy'] - float32['accuracy'])}, keras_lso "
        f"{difference(scaled['accuracy'] - float32['accuracy'])}."
        for float32, plain, scaled in zip(
            runs[::3], runs[1::3], runs[2::3], strict=True
        )
    ]
    return "\n".join([*differences, "", *NOTES])


def difference(gain):
    points = f"{abs(100 * gain):.1f}"
    if points == "0.0":
        return "loses nothing"
    return f"{'gains' if gain > 0 else 'loses'} {points}"


def draw(runs, path):
    """Draws, for each backend, the losses, the scale and the flushed shares."""
    backends = list(dict.fromkeys(run["backend"] for run in runs))
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
    )
    for column, backend in zip(axes.T, backends, strict=True):
        own = [run for run in runs if run["backend"] == backend]
        column[0].set_title(backend, fontweight="bold")
        draw_losses(column[0], own)
        draw_scale(column[1], own[2])
        draw_flushed(column[2], own[1:])
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("loss scale")
    axes[2, 0].set_ylabel("gradient values\nflushed to zero")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside upper center", ncols=len(backends), frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_losses(axis, runs):
    for run in runs:
        steps_an_epoch = len(run["scales"]) // len(run["losses"])
        axis.plot(
            [steps_an_epoch * (i + 1) for i in range(len(run["losses"]))],
            run["losses"],
            label=LABELS[run["precision"]],
            **STYLES[run["precision"]],
        )
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


def draw_scale(axis, run):
    scales, skipped = run["scales"], run["skipped"]
    axis.step(range(len(scales)), scales, where="post", **STYLES[run["precision"]])
    axis.plot(
        skipped,
        [scales[i] for i in skipped],
        "x",
        color=plt.rcParams["text.color"],
        markersize=5,
        label="skipped step",
    )
    axis.set_yscale("log", base=2)
    axis.set_xlabel("step")
    axis.legend(frameon=False, loc="upper right")


def draw_flushed(axis, runs):
    width = 0.4
    for offset, run in zip((-width / 2, width / 2), runs, strict=True):
        layers, shares = zip(*run["flushed_by_layer"].items(), strict=True)
        color = STYLES[run["precision"]]["color"]
        positions = [i + offset for i in range(len(layers))]
        bars = axis.bar(positions, shares, width, color=color)
        labels = [f"{share:.0%}" for share in shares]
        axis.bar_label(bars, labels, fontsize=8, color=color, padding=1)
    axis.set_xticks(range(len(layers)), [name.replace(" ", "\n") for name in layers])
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
