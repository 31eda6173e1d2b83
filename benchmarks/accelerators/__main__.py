"""Tells what a step would move and hold on an accelerator, on a machine that has none.

`make bench-accelerators` measures all of it, and writes a file for each target into
`results/step_bytes/`, `results/step_memory/` and `results/step_shards/`. A part alone:

    KERAS_BACKEND=torch python -m benchmarks.accelerators --targets PyTorch
"""

import argparse
import itertools
import os
import pathlib
import shlex
import sys

from benchmarks import evidence, machine
from benchmarks.report import print_table
from benchmarks.tables import Table

TARGETS = ("PyTorch", "H200", "TPU v5e", "4 x TPU v5e")
"""What a step is measured for: on PyTorch, or of JAX on these devices."""
HOLDS = ("H200", "TPU v5e")
"""For what the memory of a step is planned."""
SHARES = ("4 x H200", "4 x TPU v5e")
"""For what a step is planned whose state the devices share."""
MOVED, HELD, SHARED = "step_bytes", "step_memory", "step_shards"
"""The folders of the results."""


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--targets", nargs="*", choices=TARGETS, default=[], help="default: only print")
    add("--memory", nargs="*", choices=HOLDS, default=[], help="of a training step")
    add("--shared", nargs="*", choices=SHARES, default=[], help="with `shard_state`")
    add("--shapes", default="resnet50", help="of the trained tensors")
    add("--results", type=pathlib.Path, default=evidence.RESULTS, help="a folder")
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(argv)
    tasks = [(MOVED, target, measure) for target in options.targets]
    tasks += [(HELD, target, measure_memory) for target in options.memory]
    tasks += [(SHARED, target, measure_shards) for target in options.shared]
    for kind, target, task in tasks:
        found, rows = task(target, options.shapes)
        found["rows"] = []
        for row in rows:
            print(f"{target}: {row}", file=sys.stderr)
            found["rows"].append(row)
        command = shlex.join(["python", "-m", "benchmarks.accelerators", *argv])
        facts = machine.facts("torch" if target == "PyTorch" else "jax")
        evidence.write(file_of(kind, target, options.results), command, facts, found)
    moved, *planned = (read(kind, options.results) for kind in (MOVED, HELD, SHARED))
    for table in [*make_tables(moved), *itertools.chain(*map(plan_tables, planned))]:
        print_table(table)
    return 0


def measure(target, shapes):
    """Returns facts, and an iterable of rows, dicts; see the modules `on_*`."""
    if target == "PyTorch":
        os.environ.setdefault("KERAS_BACKEND", "torch")
        from benchmarks.accelerators import on_torch

        return {"shapes": shapes}, on_torch.measure(shapes)
    _look_for_no_device()
    from benchmarks.accelerators import on_jax

    return {"shapes": shapes}, on_jax.measure(target, shapes)


def measure_memory(target, _):
    """Returns facts, and an iterable of rows, dicts; see `memory.py`."""
    _look_for_no_device()
    from benchmarks.accelerators import memory

    return memory.facts(), memory.measure(target)


def measure_shards(target, _):
    """Returns facts, and an iterable of rows, dicts; see `shards.py`."""
    _look_for_no_device()
    from benchmarks.accelerators import shards

    return shards.facts(), shards.measure(target)


def _look_for_no_device():
    """Lets JAX compile for devices that are not there, and lay out on four CPUs."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"


def file_of(kind, target, results=evidence.RESULTS):
    """Returns where the results for a target lie, in a folder of results."""
    return results / kind / f"{machine.slug(target)}.json"


def read(kind, results=evidence.RESULTS):
    """Returns the recorded rows of each target that has any."""
    targets = SHARES if kind == SHARED else TARGETS
    files = {target: file_of(kind, target, results) for target in targets}
    return {t: evidence.read(f)["rows"] for t, f in files.items() if f.exists()}


def make_tables(results):
    """Returns a `Table` for each target: a line for each recipe."""
    return [_table(target, rows) for target, rows in results.items()]


def plan_tables(results):
    """Returns a `Table` for each target: a line for each recipe."""
    tables = []
    for target, rows in results.items():
        table = Table(f"{target}: planned, bytes a weight", [*rows[0]], left=3)
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
