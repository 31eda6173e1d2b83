"""Tells what a step would move on an accelerator, on a machine that has none.

`make bench-accelerators` measures all of it, and writes `results.json`. A part alone:

    KERAS_BACKEND=torch python -m benchmarks.accelerators --targets PyTorch
"""

import argparse
import json
import os
import pathlib
import sys

from benchmarks.report import print_table
from benchmarks.tables import Table

RESULTS = pathlib.Path(__file__).with_name("results.json")
TARGETS = {
    "PyTorch": "torch",
    "H200": "jax",
    "TPU v5e": "jax",
    "4 x TPU v5e": "jax",
}
"""What a step is measured for, and the backend that it is a step of."""


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--targets", nargs="*", choices=TARGETS, default=[], help="default: only print")
    add("--shapes", default="resnet50", help="of the trained tensors")
    add("--results", type=pathlib.Path, default=RESULTS, help="a .json file")
    options = parser.parse_args(argv)
    for target in options.targets:
        rows = []
        for row in measure(target, options.shapes):
            print(f"{target}: {row['recipe']}, {row['row']}", file=sys.stderr)
            rows.append(row)
        save(target, rows, options.results)
    for table in make_tables(read(options.results)):
        print_table(table)
    return 0


def measure(target, shapes):
    """Returns an iterable of dicts, one for each row; see the modules `on_*`."""
    os.environ.setdefault("KERAS_BACKEND", TARGETS[target])
    if target == "PyTorch":
        from benchmarks.accelerators import on_torch

        return on_torch.measure(shapes)
    # JAX compiles for devices that are not there; none is to be looked for.
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
    from benchmarks.accelerators import on_jax

    return on_jax.measure(target, shapes)


def read(path):
    """Returns the rows of each target, a dict; empty if there is no file yet."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def save(target, rows, path):
    """Writes the rows of a target in place of those that the file has."""
    found = read(path) | {target: rows}
    ordered = {name: found[name] for name in TARGETS if name in found}
    path.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


def make_tables(results):
    """Returns a `Table` for each target: a line for each recipe."""
    return [_table(target, rows) for target, rows in results.items()]


def _table(target, rows):
    recipes, names = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("recipe", "row")
    )
    columns = [f"{fact}, {name}" for fact in ("bytes", "kernels") for name in names]
    table = Table(target, ["recipe", *columns, "least bytes"], left=1)
    found = {(row["recipe"], row["row"]): row for row in rows}
    lines = []
    for recipe in recipes:
        of_recipe = [found[recipe, name] for name in names]
        cells = [f"{row['bytes']:.1f}" for row in of_recipe]
        cells += [f"{row['kernels']:,}" for row in of_recipe]
        least = found[recipe, "keras_lso"]["least"]
        lines.append([recipe, *cells, f"{least:.1f}"])
    table.sections.append((None, lines))
    return table


if __name__ == "__main__":
    sys.exit(main())
