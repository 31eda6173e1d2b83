"""Times a step of each backend, beside what else a user could run.

Without options it measures the backend in KERAS_BACKEND. `make bench` measures all of
them, each in processes of its own, and prints one table. Any part can be had alone:

    python -m benchmarks --shapes resnet50 --inner Adam LARS --parts steps --out a.json
"""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

# Before TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from benchmarks import evidence
from benchmarks.data import KINDS
from benchmarks.inner import INNER
from benchmarks.machine import short_name
from benchmarks.report import RESULTS, print_tables
from benchmarks.shapes import SHAPES

PARTS = ("steps", "masters", "compilations", "fit", "protected", "recorded")
PARTS += ("participants", "host")
MODES = ("eager", "jit", "graph", "XLA")
BACKENDS = ("tensorflow", "jax", "torch")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--backends", nargs="*", choices=BACKENDS, help="each in its own processes")
    add("--shapes", nargs="+", choices=SHAPES)
    add("--inner", nargs="+", choices=INNER)
    add("--kinds", nargs="+", choices=KINDS)
    add("--modes", nargs="+", choices=MODES, help="graph and XLA are TensorFlow's")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--rounds", type=int, default=20, help="timed ones (default: 20)")
    add("--out", type=pathlib.Path, help="a .json file, or a folder for one a backend")
    add("--slow-peers", action="store_true", help="also where they compile for minutes")
    add("--no-table", action="store_true", help="write the results only")
    add("--gpu", action="store_true", help="fail if there is no GPU")
    add("--smoke", action="store_true", help="tiny tensors, two rounds: does it run?")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    chosen = options.shapes, options.inner, options.kinds, options.modes
    is_whole = not any(chosen) and len(set(options.parts)) == len(PARTS)
    if options.smoke:
        options.shapes, options.rounds = ("tiny",), 2
        options.kinds = options.kinds or tuple(KINDS)
        options.inner = options.inner or ("SGD+momentum",)
    elif is_whole and options.rounds >= 20 and options.out is None:
        options.out = RESULTS
    if options.backends and options.out and options.out.suffix == ".json":
        parser.error("--out must be a folder where there are --backends")
    return options


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = parse_arguments(argv)
    if options.backends:
        results = [
            run_processes(backend, options, argv) for backend in options.backends
        ]
    else:
        results = [run_here(options)]
    done = [result for result in results if result is not None]
    if options.out is not None:
        for result in done:
            path = save(result, options.out, argv)
            if not options.no_table:
                print(f"Wrote {path}", file=sys.stderr)
    if not options.no_table:
        print_tables(done)
    return 1 if len(done) < len(results) or any(r["failed"] for r in done) else 0


def run_processes(backend, options, argv):
    """Measures a backend in processes of its own; returns None if one failed.

    TensorFlow has one a part, since it keeps memory of what it has run: all parts in
    one process took 19 GB.
    """
    parts = [[p] for p in options.parts] if backend == "tensorflow" else [options.parts]
    results = [run_process(backend, some, argv) for some in parts]
    if None in results:
        return None
    whole, *others = results
    for other in others:
        for name in ("failed", "groups", *PARTS[1:]):
            whole[name] += other[name]
    return whole


def run_process(backend, parts, argv):
    """Measures parts of a backend in a process; returns None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "result.json")
        # The last of two options counts, and so does a single backend's own process.
        command = [sys.executable, "-m", "benchmarks", *argv, "--parts", *parts]
        command += ["--out", str(path), "--no-table", "--backends"]
        environment = {**os.environ, "KERAS_BACKEND": backend}
        subprocess.run(command, env=environment)
        if not path.exists():
            print(f"{backend}: failed, see above.", file=sys.stderr)
            return None
        return evidence.read(path)


def run_here(options):
    """Measures the backend in KERAS_BACKEND."""
    from benchmarks.measure import measure

    with progress() as tell:
        result = measure(options, tell)
    # Six digits are more than any of it means.
    text = json.dumps(result)
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.6g}"))


@contextlib.contextmanager
def progress():
    """Gives a function that says on stderr what is being done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, share: console.print(f"{share:4.0%} {text}", highlight=False)
        return
    columns = "{task.description}", BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda text, share: bars.update(task, description=text, completed=share)


def save(result, out, argv):
    """Writes a result to a file, or to a folder under its own name; returns where."""
    name = f"{result['backend']}-{short_name(result['machine'])}.json"
    path = out if out.suffix == ".json" else out / name
    command = shlex.join(["python", "-m", "benchmarks", *argv])
    evidence.write(path, command, result["machine"], result)
    return path


if __name__ == "__main__":
    sys.exit(main())
