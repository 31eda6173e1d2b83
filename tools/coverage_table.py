"""Prints what share of the package's lines and branches the tests ran.

`make coverage` runs the tests, which leave files for each backend; this reads them, and
prints a row for each backend and one for all of them together. What only one backend
has, such as its kernels, the others cannot run: it does not count in their rows.
"""

import glob
import json
import pathlib
import tempfile

import coverage
from rich.console import Console
from rich.table import Table

BACKENDS = ("tensorflow", "jax", "torch")
TOGETHER = "together"
FOLDER = pathlib.Path(__file__).parents[1] / "build" / "coverage"


def totals(row, files):
    """Returns what `coverage json` sums up over files of measurements.

    Args:
        row: A backend, whose share leaves out the files of the others, or `TOGETHER`.
        files: List of paths.
    """
    others = () if row == TOGETHER else set(BACKENDS) - {row}
    with tempfile.TemporaryDirectory() as folder:
        measured = coverage.Coverage(data_file=f"{folder}/combined")
        measured.combine(files, keep=True)
        measured.save()
        report = pathlib.Path(folder, "report.json")
        paths = "*/_backend/{}/*", "*/compat/backend/{}.py"
        omitted = [path.format(other) for other in others for path in paths]
        omit = [*measured.get_option("report:omit"), *omitted]
        measured.json_report(outfile=str(report), omit=omit)
        return json.loads(report.read_text())["totals"]


def shares(total):
    """Returns the percentages of lines, of branches and of both."""
    lines, branches = (
        (total["covered_lines"], total["num_statements"]),
        (total["covered_branches"], total["num_branches"]),
    )
    both = lines[0] + branches[0], lines[1] + branches[1]
    return [100.0 * covered / count for covered, count in (lines, branches, both)]


def main():
    files = {b: glob.glob(f"{glob.escape(str(FOLDER))}/{b}.*") for b in BACKENDS}
    files = {backend: found for backend, found in files.items() if found}
    if not files:
        raise SystemExit("No measurements. Run `make coverage`.")
    rows = dict(files)
    rows[TOGETHER] = [file for found in files.values() for file in found]
    table = Table(title="Share of keras_lso that the tests run, in %")
    table.add_column("Backend")
    for name in ("Lines", "Branches", "Both"):
        table.add_column(name, justify="right")
    for name, found in rows.items():
        table.add_row(name, *(f"{share:.1f}" for share in shares(totals(name, found))))
    Console().print(table)


if __name__ == "__main__":
    main()
