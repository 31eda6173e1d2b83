"""Keras's LossScaleOptimizer and that of keras_lso, through a spell of overflows.

    python examples/keras_beside_keras_lso.py [--steps 4000] [--output .]

One small model is trained three times, from the same weights, on the same batches in
the same order: in `mixed_float16` with `keras.optimizers.LossScaleOptimizer` and with
`keras_lso.LossScaleOptimizer`, and in float32 with a `GuardedOptimizer`, which skips
the same steps. The classes have their default settings, and Adam inside. The script
prints a table and writes `keras_beside_keras_lso.png`. `--min-scale 1` shows another
lower bound.

The data. A batch contains 32 readings of 8 sensors, and the target is a smooth function
of them. The readings are random, because the effect needs no real data.

The overflows. From step 600 to step 1400, one sensor fails in one batch of four. Its
readings are 9.97e36, netCDF's fill value for missing data. Nobody has cleaned the data.
Float16 ends at 65504, so the reading is inf in the forward pass, and every gradient of
that step is inf or NaN. Anything else that makes so many steps overflow has the same
effect. The steps need not follow each other.

The two classes. Both skip each of those steps, and halve the loss scale. Both double it
after 2,000 finite steps in a row. Keras's class has no lower bound: the scale falls
below the range that float16 gradients need, and then to 0.0. The next good batch has
gradients of 0 * loss, which are 0 and finite, and 0 / 0.0 makes every weight NaN. The
class of keras_lso stops at its `min_scale`, 2**-14, where large gradients still pass,
and climbs from there when the spell is over.

Why it trains at 2**-14. The table says which share of this model's gradients float16
makes 0 at the last scale. Most are left with one to three bits of their eleven, too few
for a model with small gradients, but here the loss is that of float32.
"""

import argparse
import dataclasses
import pathlib

import keras
import matplotlib
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import keras_lso

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS, BATCH, SENSORS = 4000, 32, 8
SPELL, SHARE = (600, 1400), 0.25
MISSING = 9.96921e36
SMOOTHED = 50  # The picture shows the median loss of this many steps.
END = 500  # The table has the median loss of this many steps.

FLOAT32, KERAS, OURS = "float32", "keras.optimizers", "keras_lso"
CLASSES = {
    FLOAT32: keras_lso.GuardedOptimizer,
    KERAS: keras.optimizers.LossScaleOptimizer,
    OURS: keras_lso.LossScaleOptimizer,
}
# What a curve covers is broader, and seen to be the same. "C0" and "C1" are the first
# colours of matplotlib's style.
STYLES = {
    FLOAT32: {
        "label": "float32, which skips the same steps",
        "color": "gray",
        "alpha": 0.8,
        "linewidth": 7,
    },
    KERAS: {
        "label": "keras.optimizers.LossScaleOptimizer",
        "color": "C1",
        "linewidth": 3.5,
    },
    OURS: {
        "label": "keras_lso.LossScaleOptimizer",
        "color": "C0",
        "linewidth": 1.5,
    },
}


@dataclasses.dataclass
class Run:
    """What one of the classes made of the batches: an entry for each step."""

    losses: np.ndarray
    scales: np.ndarray
    bad: np.ndarray
    weights_nan: float
    flushed: float

    @property
    def lost_at(self):
        """The step that made the weights NaN, or None."""
        lost = np.flatnonzero(np.isnan(self.losses) & ~self.bad)
        # The loss of a good batch is NaN one good step after the weights became so.
        return int(np.flatnonzero(~self.bad[: lost[0]])[-1]) if len(lost) else None

    @property
    def zero_at(self):
        """The step that made the scale 0.0, of a run that is lost."""
        return int(np.flatnonzero(self.scales == 0)[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--min-scale", type=float, default=2.0**-14)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    if arguments.steps < SPELL[1] + SMOOTHED:
        parser.error(f"--steps must be at least {SPELL[1] + SMOOTHED}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    runs = {}
    for name in CLASSES:
        with console.status(f"Training with {STYLES[name]['label']}"):
            runs[name] = train(name, arguments.steps, arguments.min_scale)
    picture = arguments.output / "keras_beside_keras_lso.png"
    draw(runs, picture)
    console.print(make_table(runs))
    console.print(caption(runs))
    console.print(f"Trained on {keras.backend.backend()}. Wrote {picture}")


# --- Training -----------------------------------------------------------------------


def make_data(steps):
    """Returns the readings and targets of each step, and which steps are bad."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, BATCH, SENSORS)).astype("float32")
    y = np.sin(x[..., :4]).sum(axis=-1, keepdims=True) + x[..., 4:5] * x[..., 5:6]
    step = np.arange(steps)
    in_spell = (step >= SPELL[0]) & (step < SPELL[1])
    bad = in_spell & (rng.random(steps) < SHARE)
    x[bad, :, 3] = MISSING
    return x, y.astype("float32"), bad


def make_model(optimizer):
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    output = keras.layers.Dense(1, dtype="float32")
    model = keras.Sequential([keras.Input((SENSORS,)), *hidden, output])
    model.compile(optimizer, loss="mse")
    return model


def train(name, steps, min_scale):
    """Trains a new model with one of the classes."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32" if name == FLOAT32 else "mixed_float16")
    bounds = {"min_scale": min_scale} if name == OURS else {}
    model = make_model(CLASSES[name](keras.optimizers.Adam(), **bounds))
    x, y, bad = make_data(steps)
    losses, scales = np.zeros(steps), np.full(steps, np.nan)
    for step in range(steps):
        # Without this, `train_on_batch` returns the mean of all steps so far.
        model.reset_metrics()
        losses[step] = model.train_on_batch(x[step], y[step])
        if name != FLOAT32:
            scale = model.optimizer.dynamic_scale.value
            scales[step] = keras.ops.convert_to_numpy(scale)
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    last = np.flatnonzero(~bad)[-1]
    flushed = share_flushed(model, x[last], y[last], scales[-1])
    return Run(losses, scales, bad, float(np.isnan(weights).mean()), flushed)


def share_flushed(model, x, y, scale):
    """Returns which share of the gradients float16 makes 0, a mean over the layers."""
    if not scale > 0:
        return np.nan
    report = keras_lso.underflow_report(model, x, y, scales=[scale])
    return float(np.mean([found.flushed for found in report.layers.values()]))


# --- The report ---------------------------------------------------------------------


def make_table(runs):
    table = Table(title="LossScaleOptimizer(Adam()) of ...", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    cells = {
        "bad batches": lambda run: f"{run.bad.sum():,} of {len(run.bad):,}",
        "lowest loss scale": lambda run: power_of_two(run.scales.min()),
        "loss scale at the end": lambda run: power_of_two(run.scales[-1]),
        "gradients it makes 0": lambda run: percent(run.flushed),
        "weights that are NaN": lambda run: percent(run.weights_nan),
        "loss before the spell": lambda run: f"{smooth(run)[SPELL[0] - 1]:.3f}",
        "loss at the end": lambda run: f"{end_of(run):.3f}",
    }
    for title, cell in cells.items():
        table.add_row(title, *(cell(run) for run in runs.values()))
    return table


def power_of_two(scale):
    if np.isnan(scale):
        return "-"
    return f"2**{np.log2(scale):.0f}" if 0 < scale < np.inf else f"{scale}"


def percent(share):
    return "-" if np.isnan(share) else f"{share:.0%}"


def end_of(run):
    """Returns the median loss of the good ones among the last steps."""
    return np.median(run.losses[-END:][~run.bad[-END:]])


def caption(runs):
    """Says in words what the table shows."""
    first, last = SPELL
    bad = runs[OURS].bad.sum()
    words = [
        f"From step {first} to step {last}, {bad} batches hold readings of 9.97e36, "
        "netCDF's mark of a missing value, and overflow."
    ]
    for name, run in runs.items():
        label = STYLES[name]["label"]
        if name == FLOAT32:
            words.append("float32: a GuardedOptimizer skips the same steps.")
        elif run.lost_at is None:
            lowest = power_of_two(run.scales.min())
            words.append(f"{label}: the scale falls to {lowest}, and training goes on.")
        else:
            overflows = run.bad[: run.zero_at + 1].sum()
            words.append(
                f"{label}: the scale is 0.0 after {overflows} overflows, and step "
                f"{run.lost_at} makes the weights NaN."
            )
    return "\n".join(words)


def smooth(run):
    """Returns the median loss of the good steps among the last few, for each step."""
    good = np.where(run.bad, np.nan, run.losses)
    windows = [good[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(good))]
    # The loss of a run that is lost is NaN. A bad batch is left out.
    lost = len(good) if run.lost_at is None else run.lost_at + 1
    return np.array(
        [np.nanmedian(w) if i < lost else np.nan for i, w in enumerate(windows)]
    )


def draw(runs, path):
    figure, (scale, loss) = plt.subplots(
        2, 1, figsize=(6.4, 5.4), sharex=True, layout="constrained"
    )
    for name, run in runs.items():
        # Zero has no place on a logarithmic axis, and float32 has no scale.
        scale.plot(np.where(run.scales > 0, run.scales, np.nan), **STYLES[name])
        loss.plot(smooth(run), **STYLES[name])
        if run.lost_at is not None:
            mark_loss(run, scale, loss, STYLES[name]["color"])
    for axis in (scale, loss):
        axis.axvspan(*SPELL, color="gray", alpha=0.2, linewidth=0, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    scale.set_yscale("log", base=2)
    lowest = runs[OURS].scales.min()
    scale.annotate(
        f"min_scale of keras_lso, {power_of_two(lowest)}",
        (1.0, lowest),
        xycoords=scale.get_yaxis_transform(),
        xytext=(0, -14),
        textcoords="offset points",
        ha="right",
    )
    scale.set_ylabel("loss scale")
    loss.set_yscale("log")
    loss.set_ylabel("training loss")
    loss.set_xlabel("step")
    scale.set_yticks([2.0**exponent for exponent in (15, -14, -50, -100, -149)])
    scale.minorticks_off()
    scale.set_title(
        "Shaded: one batch in four has missing readings and overflows", fontsize=10
    )
    figure.legend(
        *scale.get_legend_handles_labels(), frameon=False, loc="outside upper left"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def mark_loss(run, scale, loss, color):
    """Marks where the scale became 0.0 and the weights NaN."""
    last_scale, last_loss = run.scales[run.zero_at - 1], smooth(run)[run.lost_at]
    marks = (
        (scale, run.zero_at, last_scale, "the scale is 0.0"),
        (loss, run.lost_at, last_loss, "every weight is NaN"),
    )
    for axis, step, height, text in marks:
        axis.plot([step], [height], "X", color=color, markersize=13)
        axis.annotate(
            text,
            (step, height),
            xytext=(9, -3),
            textcoords="offset points",
            color=color,
        )


if __name__ == "__main__":
    main()
