"""Tells what a step would move and hold on an accelerator, on a machine that has none.

`make bench-accelerators` measures all of it, and writes `results.json` and
`memory.json`. A part alone:

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
MEMORY = pathlib.Path(__file__).with_name("memory.json")
TARGETS = {
    "PyTorch": "torch",
    "H200": "jax",
    "TPU v5e": "jax",
    "4 x TPU v5e": "jax",
}
"""What a step is measured for, and the backend that it is a step of."""
HOLDS = ("H200", "TPU v5e")
"""For what the memory of a step is planned."""


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--targets", nargs="*", choices=TARGETS, default=[], help="default: only print")
    add("--memory", nargs="*", choices=HOLDS, default=[], help="of a training step")
    add("--shapes", default="resnet50", help="of the trained tensors")
    add("--results", type=pathlib.Path, default=RESULTS, help="a .json file")
    options = parser.parse_args(argv)
    for target in options.targets:
        rows = []
        for row in measure(target, options.shapes):
            print(f"{target}: {row['recipe']}, {row['row']}", file=sys.stderr)
            rows.append(row)
        save(target, rows, options.results)
    for target in options.memory:
        measure_memory(target)
    for table in [*make_tables(read(options.results)), *memory_tables(read(MEMORY))]:
        print_table(table)
    return 0


def measure(target, shapes):
    """Returns an iterable of dicts, one for each row; see the modules `on_*`."""
    os.environ.setdefault("KERAS_BACKEND", TARGETS[target])
    if target == "PyTorch":
        from benchmarks.accelerators import on_torch

        return on_torch.measure(shapes)
    _look_for_no_device()
    from benchmarks.accelerators import on_jax

    return on_jax.measure(target, shapes)


def measure_memory(target):
    """Writes the rows of `memory.py` for a target into its file."""
    _look_for_no_device()
    from benchmarks.accelerators import memory

    rows = []
    for row in memory.measure(target):
        print(f"{target}: {row}", file=sys.stderr)
        rows.append(row)
    found = read(MEMORY).get("rows", {}) | {target: rows}
    results = memory.facts() | {"rows": {t: found[t] for t in HOLDS if t in found}}
    MEMORY.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def _look_for_no_device():
    """JAX compiles for devices that are not there."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")


def read(path):
    """Returns what a file holds, a dict; empty if there is no file yet."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def save(target, rows, path):
    """Writes the rows of a target in place of those that the file has."""
    found = read(path) | {target: rows}
    ordered = {name: found[name] for name in TARGETS if name in found}
    path.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


def make_tables(results):
    """Returns a `Table` for each target: a line for each recipe."""
    return [_table(target, rows) for target, rows in results.items()]


def memory_tables(results):
    """Returns a `Table` for each target: a line for each recipe."""
    tables = []
    for target, rows in results.get("rows", {}).items():
        table = Table(f"{target}: held, bytes a weight", [*rows[0]], left=3)
        lines = [[str(cell) for cell in row.values()] for row in rows]
        table.sections.append((None, lines))
        tables.append(table)
    return tables


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
