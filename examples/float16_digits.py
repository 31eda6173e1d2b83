"""Models whose weights are float16 or bfloat16, without masters and with each kind.

Trains a small classifier of handwritten digits (scikit-learn's 1,797) on each
installed Keras backend, with SGD and with Adam at Keras's default learning rates,
from the same weights:

- float32;
- float16 (Keras's `float16` dtype policy, under which the weights are float16 too);
- float16 with `keras_lso.LossScaleOptimizer(..., master_weights=False)`;
- the same with `"float32"` masters, `"remainder"` and `"stochastic"` instead of False.

With `--dtype bfloat16`, also with an Adam whose `beta_2` is 0.99:

- float32;
- bfloat16 (Keras's `bfloat16` dtype policy);
- bfloat16 with `keras_lso.GuardedOptimizer(..., master_weights="float32")`;
- the same with `"remainder"` and `"stochastic"`.

Run it with

    python examples/float16_digits.py [--dtype bfloat16] [--epochs 50] [--output .]
                                      [--backends tensorflow jax torch]

It prints a table of the results, and draws the losses into
`float16_digits.png` or `bfloat16_digits.png` in the output folder.
`float16_digits_worker.py` trains.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BACKENDS = ("tensorflow", "jax", "torch")
WORKER = pathlib.Path(__file__).with_name("float16_digits_worker.py")

# "C0" to "C4" are the first colours of matplotlib's style. Float32 is broad and pale,
# and two of the kinds of masters have dashes, one between the other's: what lies on top
# of another line is seen to do so.
_BARE = {"color": "C1", "linewidth": 1.8}
_MASTERS = {"color": "C0", "linewidth": 2.2}
_REMAINDER = {"color": "C4", "linewidth": 2.2, "linestyle": (0, (2, 4))}
_STOCHASTIC = {"color": "C3", "linewidth": 2.2, "linestyle": (3, (2, 4))}
STYLES = {
    "float32": {"color": "gray", "alpha": 0.5, "linewidth": 6},
    "float16": _BARE,
    "float16, loss scale": {"color": "C2", "linewidth": 1.8, "linestyle": "--"},
    "float16, loss scale, masters": _MASTERS,
    "float16, loss scale, remainder": _REMAINDER,
    "float16, loss scale, stochastic": _STOCHASTIC,
    "bfloat16": _BARE,
    "bfloat16, masters": _MASTERS,
    "bfloat16, remainder": _REMAINDER,
    "bfloat16, stochastic": _STOCHASTIC,
}

FIGURES = """\
Accuracy is on 450 digits: one of them is 0.2 points. The loss is the cross-entropy \
of the last 90 steps.
"""
NOTES = {
    "float16": """
SGD: a float16 weight of 0.1 has its neighbours 0.00006 away. A step of less than \
half of that is rounded away, which at a learning rate of 0.01 is every gradient \
below 0.003. The better the model, the smaller the gradients: it slows down more and \
more. (Digits as easy as these hardly show it in the accuracy, but in the loss.)

Adam: its second moment grows by a thousandth of the squared gradient. For gradients \
below 0.005 or so that is less than float16 can add to zero, so Adam divides by its \
epsilon instead (1e-7: the second smallest number of float16), and takes steps of up \
to 1 and more where it should take one of 0.001. The model starts in ruins, and then \
has the trouble that SGD has.

Loss scaling alone cures neither: gradients are unscaled before the optimizer sees \
them. With masters, the optimizer works in float32 throughout, and the model has the \
float32 numbers, rounded. In memory are the numbers (masters), what rounding takes off \
them (remainder), or nothing, where they are rounded at random (stochastic). Which of \
the three hardly makes a difference here.""",
    "bfloat16": """
SGD: a bfloat16 weight of 0.1 has its neighbours 0.0005 away. A step of less than \
half of that is rounded away, which at a learning rate of 0.01 is every gradient \
below 0.02.

Adam: Keras computes its step in bfloat16, in which the beta_2 of 0.999 is 1. The \
bias correction 1 - beta_2**t is 0 then, and so is the step. The model remains as it \
began.

Adam with a beta_2 of 0.99 takes steps of about 0.001, which bfloat16 can add to most \
weights. It reads as many test digits as with masters. Its loss ends higher, since \
steps become smaller in the end.

With masters, the optimizer works in float32 throughout, and the model has the \
float32 numbers, rounded. In memory are the numbers (masters), what rounding takes off \
them (remainder), or nothing, where they are rounded at random (stochastic). Which of \
the three hardly makes a difference here: where the gradients of batches differ \
little, the noise of rounding at random becomes small with the steps.""",
}


def main():
    arguments = parse_arguments()
    dtype = arguments.dtype
    console = Console(highlight=False)
    installed = [b for b in arguments.backends if importlib.util.find_spec(b)]
    for backend in arguments.backends:
        if backend not in installed:
            console.print(f"{backend} is not installed: left out.")
    if not installed:
        sys.exit("None of these backends is installed, so there is nothing to train.")
    start = time.perf_counter()
    with console.status("Training"), ThreadPoolExecutor(len(installed)) as pool:
        results = pool.map(lambda b: train_on(b, dtype, arguments.epochs), installed)
        runs = [run for result in results for run in result]
    picture = arguments.output / f"{dtype}_digits.png"
    draw(runs, picture)
    console.print(make_table(runs, dtype))
    console.print(FIGURES + NOTES[dtype])
    seconds = time.perf_counter() - start
    console.print(f"\nWrote {picture}. All of it took {seconds:.0f} s.")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=NOTES, default="float16")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=BACKENDS, metavar="BACKEND"
    )
    parser.add_argument("--epochs", type=int, default=50, help="of 90 steps each")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments


def train_on(backend, dtype, epochs):
    """Returns the runs of a backend, which needs a process of its own."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # The workers run side by side: let each keep to one core.
        "OMP_NUM_THREADS": "1",
    }
    worker = subprocess.run(
        [sys.executable, str(WORKER), dtype, str(epochs)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if worker.returncode != 0:
        raise RuntimeError(f"The {backend} worker failed:\n{worker.stderr}")
    return [{"backend": backend, **run} for run in json.loads(worker.stdout)]


def select(runs, **wanted):
    return [run for run in runs if wanted.items() <= run.items()]


def distinct(runs, name):
    return list(dict.fromkeys(run[name] for run in runs))


def make_table(runs, dtype):
    table = Table(
        title=f"A classifier of 1,797 handwritten digits, weights in {dtype}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("backend", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    for optimizer in distinct(runs, "optimizer"):
        lines = [*optimizer.split(", "), "accuracy,", "loss"]
        table.add_column("\n".join(lines), justify="right", no_wrap=True)
    for backend in distinct(runs, "backend"):
        if table.rows:
            table.add_section()
        for weights in distinct(runs, "weights"):
            cells = [
                f"{run['accuracy']:.1%}  {run['losses'][-1]:.4f}"
                for run in select(runs, backend=backend, weights=weights)
            ]
            name = backend if weights == "float32" else ""
            table.add_row(name, weights, *cells)
    return table


def draw(runs, path):
    """Draws the losses: a column for each backend, a row for each optimizer."""
    backends, optimizers = distinct(runs, "backend"), distinct(runs, "optimizer")
    figure, axes = plt.subplots(
        len(optimizers),
        len(backends),
        figsize=(1.0 + 2.8 * len(backends), 0.6 + 2.4 * len(optimizers)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, optimizer in zip(axes, optimizers, strict=True):
        for axis, backend in zip(row, backends, strict=True):
            for run in select(runs, backend=backend, optimizer=optimizer):
                steps = [90 * (i + 1) for i in range(len(run["losses"]))]
                style = STYLES[run["weights"]]
                axis.plot(steps, run["losses"], label=run["weights"], **style)
            axis.set_yscale("log")
            axis.spines[["top", "right"]].set_visible(False)
        name = optimizer.replace(", ", ",\n")
        row[0].set_ylabel(f"{name}: training loss")
    for axis, backend in zip(axes[0], backends, strict=True):
        axis.set_title(backend, fontweight="bold")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    ncols = min(3, 1 + len(backends))
    figure.legend(lines, labels, loc="outside upper center", ncols=ncols, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
