"""Float16 with and without loss scaling, on real handwritten digits.

Trains a small convolutional classifier on scikit-learn's 1,797 scanned digits, on
each installed Keras backend, from four seeds, and from the same weights in

- float32;
- float16 (Keras's `mixed_float16` dtype policy) with no loss scaling;
- float16 with `keras_lso.LossScaleOptimizer`, with its default settings.

Run it with `make demo`, or

    python examples/train_digits.py [--backends tensorflow jax torch]
                                    [--epochs 40] [--output .]

It prints a line a run, a table, and by how much float16 differs from float32, with an
interval over the seeds. It writes `demo.png` into the output folder.

Why float16 fails here. The smallest number above zero in float16 is 6e-8, and values
below half of that become zero. The network is a small LeNet with sigmoids, of
the kind that was made for this very task in the 1990s, and every part of it makes
gradients smaller on their way from the loss to the first layer:

- the loss is the squared error, averaged over 10 classes and a batch of 225: each
  of the 2,250 terms has a weight of 4e-4;
- the softmax has a slope of p (1 - p), 0.09 for the one in ten of a guess;
- a sigmoid has a slope of 1/4 at most, and there are four in a row: 4e-3 or less;
- average pooling hands a quarter of the gradient to each of four pixels, twice:
  6e-2.

The product is 9e-9, before any weight (mostly well below 1) is multiplied in.
The network is not at fault: Adam divides the gradients by their own size, so float32
learns as if they were large. Float16 cannot represent them. (With ReLUs instead of the
sigmoids, float16 needs no loss scaling on so small a task.)

The share "flushed to zero". Four times in the run of the first seed, the gradient of
one fixed batch is computed twice at the current weights. Once it is computed in
float32. Once it is computed in float16 as in the run, from the loss times its current
loss scale (1 where there is none). The share is that of the weights and biases whose
gradient is zero in float16, before it is unscaled, among those whose gradient is not
zero in float32. Counts are added up over the run.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from digits_report import caption, draw, make_table
from rich.console import Console

BACKENDS = ("tensorflow", "jax", "torch")
WORKER = pathlib.Path(__file__).with_name("digits_worker.py")


def main():
    arguments = parse_arguments()
    console = Console()
    installed = [b for b in arguments.backends if importlib.util.find_spec(b)]
    for backend in arguments.backends:
        if backend not in installed:
            console.print(f"{backend} is not installed: left out.")
    if not installed:
        sys.exit("None of these backends is installed, so there is nothing to train.")
    start = time.perf_counter()
    runs = train_on_all(installed, arguments.epochs, console)
    picture = arguments.output / "demo.png"
    draw(runs, picture)
    console.print(make_table(runs))
    console.print(caption(runs), highlight=False)
    seconds = time.perf_counter() - start
    console.print(f"Wrote {picture}. All of it took {seconds:.0f} s.", highlight=False)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=BACKENDS, metavar="BACKEND"
    )
    parser.add_argument("--epochs", type=int, default=40, help="of six steps each")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments


def train_on_all(backends, epochs, console):
    """Trains on all backends side by side; returns the runs in their order."""

    def train(backend):
        return train_on(backend, epochs, console)

    with ThreadPoolExecutor(len(backends)) as pool:
        return [run for runs in pool.map(train, backends) for run in runs]


def train_on(backend, epochs, console):
    """Runs a worker and follows what it prints, one JSON object a run.

    Keras picks its backend when it is imported, so each needs its own process.
    """
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # The workers run side by side: let each keep to one core.
        "OMP_NUM_THREADS": "1",
        # Compiling takes most of the time on JAX.
        "XLA_FLAGS": "--xla_backend_optimization_level=1",
    }
    runs = []
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(epochs)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for line in worker.stdout or ():
            run = {"backend": backend, **json.loads(line)}
            runs.append(run)
            console.print(
                f"{backend:<11}{run['precision']:<19} seed {run['seed']}: loss "
                f"{run['losses'][-1]:.4f}, accuracy {run['accuracy']:.1%}",
                highlight=False,
            )
        if worker.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"The {backend} worker failed:\n{errors.read()}")
    return runs


if __name__ == "__main__":
    main()
