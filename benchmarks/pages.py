"""Writes the tables of README.md and docs/ that show results in `benchmarks/results/`.

    python -m benchmarks.pages [--check]

A table is found by its first headings; its rows are replaced. Of those in `selected.py`
the page chooses the rows, by their words. With `--check` nothing is written, and it
fails if a page is not current, or a table on no page.
"""

import argparse
import functools
import importlib
import pathlib
import re
import sys
from unittest import mock

from benchmarks import evidence, rounding, selected, spikes_healthy
from benchmarks.accelerators import __main__ as accelerators
from conformance import __main__ as conformance

ROOT = pathlib.Path(__file__).parents[1]
RECIPE = ("policy", "masters", "slots")


def moved_bytes():
    """The bytes that a step moves: of ours, and of the optimizer alone.

    Left out are those of which the page says in a line how they differ from others.
    """
    moved = accelerators.read(accelerators.MOVED)
    recipes, cells = {}, {}
    for target, rows in moved.items():
        for row in rows:
            recipe = row["recipe"]
            if re.match(r"(SGD\+momentum|AdamW), |.*, float16, ", recipe):
                continue
            if row["row"] == "keras_lso":
                recipes[recipe] = f"{row['least']:.1f}"
                cells[recipe, target] = f"{row['bytes']:.1f}"
            else:
                cells[recipe, target] += f" ({row['bytes']:.1f})"
    return [
        [recipe, *(cells.get((recipe, target), "") for target in moved), least]
        for recipe, least in recipes.items()
    ]


def shared_state():
    """The bytes that four H200 exchange and hold, with shared state or without."""
    messages = ("all-reduce", "reduce-scatter", "all-gather")
    numbers = (*messages, "sent", "arguments", "peak")
    return [
        [
            "H200",
            *(row[name] for name in RECIPE),
            "a part" if row["shard_state"] else "all",
            *(f"{row[name]:.1f}" for name in numbers),
        ]
        for row in accelerators.read(accelerators.SHARED)["4 x H200"]
    ]


def bfloat16_set_ups():
    """The table that the example prints."""
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        example = importlib.import_module("bfloat16_transformer")
    files = sorted((evidence.RESULTS / example.__name__).glob("*.json"))
    rows = []
    for file in files:
        table = example.make_table(evidence.read(file)["results"])
        columns = [map(str, column.cells) for column in table.columns]
        rows += [list(map(str.strip, row)) for row in zip(*columns, strict=True)]
    return [[selected.BACKENDS[backend], *row] for backend, *row in rows]


def compiled_times():
    """The milliseconds of a batch of compiled `fit`, and the seconds of its first."""
    lines = []
    for group in evidence.read(evidence.RESULTS / "compiled" / "fit.json")["groups"]:
        rows = group["rows"]
        cells = (f"{r['ms']:.3g} ({r['first_s']:.0f})" for r in rows)
        lines.append([group["model"], group["policy"], str(group["tensors"]), *cells])
    return lines


ASKED = evidence.read(conformance.RESULTS)["participants"]


def asked(*names):
    """Returns the first headings of a table of participants, and what makes its rows.

    Left out are the rows in which each says the same.
    """
    versions = (" ".join([n, *ASKED[n]["versions"].values()]) for n in names)
    return f"in this case | {' | '.join(versions)}", lambda: _cases(names)


def _cases(names):
    lines = []
    for case in conformance.PROPERTIES:
        cells = [conformance.found(ASKED[name], case) for name in names]
        if len({*cells}) > 1:
            lines.append([case, *(" / ".join(t for t, _ in cell) for cell in cells)])
    return lines


TABLES = {
    "recipe": moved_bytes,
    "each of four": shared_state,
    "backend | set-up": bfloat16_set_ups,
    "compiled model": compiled_times,
    "rounding": lambda: rounding.table(evidence.read(rounding.RESULTS)["rows"]),
    "rule": lambda: spikes_healthy.table(evidence.read(spikes_healthy.RESULTS)),
    **dict(
        asked(*others, "keras_lso")
        for others in (
            ["Keras", "GradScaler"],
            ["GradScaler", "Accelerate", "Fabric"],
            ["jmp", "flax", "mpx", "apply_if_finite"],
        )
    ),
}
"""What makes the rows of each table, by its first headings."""


@functools.cache
def _rows(headings):
    return list((TABLES | selected.TABLES)[headings]())


def _renewed(headings, match):
    """Returns a table with new rows."""
    rows = _rows(headings)
    if headings in selected.TABLES:
        # The columns of words are on the left.
        words = match["line"].count("|") - 1 - match["line"].count("---:")
        known = {tuple(row[:words]): row for row in rows}
        lines = [line.strip("| ").split(" | ") for line in match["rows"].splitlines()]
        rows = [known[tuple(cells[:words])] for cells in lines]
    return match["head"] + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def renew(text):
    """Returns the text of a page with new rows, and the tables that it has."""
    found = []
    for headings in TABLES | selected.TABLES:
        head = rf"(?<=\n)(?P<head>\| {re.escape(headings)} \|.*\n(?P<line>\|[-: |]+)\n)"
        if match := re.search(rf"{head}(?P<rows>(?:\|.*\n)*)", text):
            renewed = _renewed(headings, match)
            text = text[: match.start()] + renewed + text[match.end() :]
            found.append(headings)
    return text, found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail")
    checks, missing = parser.parse_args(argv).check, {*TABLES, *selected.TABLES}
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        old = path.read_text()
        new, found = renew(old)
        missing -= set(found)
        if new == old:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not checks:
            path.write_text(new)
            print(f"{stale[-1]}: {'; '.join(found)}")
    if missing:
        print(f"On no page: {sorted(missing)}", file=sys.stderr)
    if checks and stale:
        told = f"Not current: {', '.join(stale)}. Run `python -m benchmarks.pages`."
        print(told, file=sys.stderr)
    return int(bool(missing or (checks and stale)))


if __name__ == "__main__":
    sys.exit(main())
