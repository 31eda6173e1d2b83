"""Compiles the 16-bit steps of PyTorch for an H200, on a machine that has none.

    KERAS_BACKEND=torch KERAS_LSO_KERNELS=compile \\
        python -m benchmarks.accelerators.kernels

tells the kernels of each step, their registers and the bytes that they move, and fails
where a step is more than one kernel or spills a register. It needs the Triton that
`make bench-kernels` installs.
"""

import argparse
import contextlib
import importlib.util
import itertools
import sys
import warnings
from unittest import mock

from benchmarks import evidence, machine
from benchmarks.bytes_moved import bytes_of_step
from benchmarks.host import Recipe
from benchmarks.inner import INNER
from benchmarks.report import print_table
from benchmarks.shapes import SHAPES, parameters
from benchmarks.tables import Table

RESULTS = evidence.RESULTS / "step_kernels" / "h200.json"
STORED = [
    (weights, masters)
    for masters in ("float32", "remainder", "remainder8", "stochastic")
    for weights in ("float16", "bfloat16")
]
SLOTS = ("float32", "bfloat16", "int8")
STEPS = [
    *(("Adam", *of, slots) for slots in SLOTS for of in STORED),
    ("Adam", "float32", None, "bfloat16"),
    *(
        (inner, *of)
        for inner in ("SGD+momentum", "Lion", "LARS", "LAMB")
        for of in (
            ("float16", "float32", "float32"),
            ("bfloat16", "remainder", "float32"),
            ("bfloat16", "stochastic", "bfloat16"),
        )
    ),
]
"""The rule, the dtype of the weights, the kind of their masters, the dtype of slots."""
HEADINGS = ("step", "weights", "masters", "slots")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerators.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--inner", nargs="*", choices=INNER, help="only their steps, and no results")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed: run `make bench-kernels`.")
    rows = []
    for row in measure(options.inner or INNER):
        print(row, file=sys.stderr)
        rows.append(row)
    if options.inner is None:
        command = "make bench-kernels"
        evidence.write(RESULTS, command, machine.facts("torch"), {"rows": rows})
    print_table(make_table(rows))
    found = faults(rows)
    for fault in found:
        print(f"FAILED: {fault}", file=sys.stderr)
    return int(bool(found))


def measure(inner=INNER):
    """Yields dicts: a step, what its compiled function does, and what is around it."""
    import torch

    from benchmarks.accelerators import on_torch
    from benchmarks.accelerators.inductor import Inductor
    from benchmarks.accelerators.meta import as_accelerator

    warnings.filterwarnings("error", module="keras_lso")
    # It is about the last digit of `pow`, which no step calls.
    warnings.filterwarnings("ignore", "CUDA_HOME not set")
    inductor = Inductor()
    compile_ = mock.patch.object(torch, "compile", inductor.compile)
    for step in (step for step in STEPS if step[0] in inner):
        name, weights, masters, slots = step
        # With norms, or with blocks that share a scale, a function takes one tensor.
        is_of_one = INNER[name].weight_norms or slots == "int8"
        shapes = "one" if is_of_one else "resnet50"
        slots = slots if slots != "float32" else None
        recipe = Recipe("", name, kind=weights, masters=masters or "auto", slots=slots)
        with as_accelerator(), compile_:
            tensors = on_torch.MetaTensors(shapes, weights)
            around = on_torch.ours(recipe, tensors, compiling=contextlib.nullcontext)
        # It steps twice.
        programs = inductor.calls[len(inductor.calls) // 2 :]
        inductor.calls.clear()
        torch._dynamo.reset()
        count = parameters(SHAPES[shapes]())
        least = bytes_of_step(shapes, name, weights, masters=masters, slots=slots)
        registers = set(itertools.chain(*(p.registers for p in programs)))
        yield {
            **dict(zip(HEADINGS, step, strict=True)),
            "shapes": shapes,
            "kernels": sum(p.kernels for p in programs),
            "registers": sorted(registers),
            "spilled": sum(map(spilled, programs)),
            "bytes": round(sum(p.bytes for p in programs) / count, 1),
            "launches around": around.launches,
            "bytes around": round(around.bytes / count, 1),
            "least": least / count,
        }


def spilled(program):
    """Returns the bytes that a thread of a program has no register for.

    Inductor compiles a reduction in several sizes of its blocks, and runs the fastest.
    """
    one = program.kernels == 1
    return min(program.spilled, default=0) if one else sum(program.spilled)


def faults(rows):
    """Returns a line for each step that is not as it should be."""
    found = []
    for row in rows:
        step = ", ".join(filter(None, (row[name] for name in HEADINGS)))
        if not row["registers"]:
            found.append(f"{step}: not compiled")
        # The norms of a tensor are known before the step of its first element.
        if row["kernels"] > 1 and not INNER[row["step"]].weight_norms:
            found.append(f"{step}: {row['kernels']} kernels")
        if row["spilled"]:
            found.append(f"{step}: spills {row['spilled']} bytes a thread")
    return found


def cells(row):
    """Returns the strings of a row."""
    return [
        *(row[name] or "" for name in HEADINGS),
        str(row["kernels"]),
        ", ".join(map(str, row["registers"])),
        str(row["spilled"]),
        f"{row['bytes']:.1f}",
        str(row["launches around"]),
        *(f"{row[name]:.1f}" for name in ("bytes around", "least")),
    ]


def make_table(rows):
    """Returns a `Table` with a line for each step."""
    columns = [*HEADINGS, "kernels", "registers", "spilled", "bytes"]
    columns += ["launches around", "bytes around", "least bytes"]
    table = Table("Compiled steps for an H200", columns, left=len(HEADINGS))
    table.sections.append((None, list(map(cells, rows))))
    return table


if __name__ == "__main__":
    sys.exit(main())
