"""Prints what share of the package's lines and branches the tests ran.

`make coverage` runs the tests, which leave files for each backend. A row for a backend
leaves out the files that only the others import.
"""

import glob
import json
import pathlib
import tempfile

import coverage
from rich.console import Console
from rich.table import Table

BACKENDS = ("tensorflow", "jax", "torch")
FOLDER = pathlib.Path(__file__).parents[1] / "build" / "coverage"


def shares(files, others):
    """Returns the percentages of lines, of branches and of both, as strings."""
    with tempfile.TemporaryDirectory() as folder:
        measured = coverage.Coverage(data_file=f"{folder}/combined")
        measured.combine(files, keep=True)
        paths = "*/_backend/{}/*", "*/compat/backend/{}.py"
        omitted = [path.format(other) for other in others for path in paths]
        report = pathlib.Path(folder, "report.json")
        omit = [*measured.get_option("report:omit"), *omitted]
        measured.json_report(outfile=str(report), omit=omit)
        total = json.loads(report.read_text())["totals"]
    lines = total["covered_lines"], total["num_statements"]
    branches = total["covered_branches"], total["num_branches"]
    both = lines[0] + branches[0], lines[1] + branches[1]
    return [
        f"{100 * covered / count:.1f}" for covered, count in (lines, branches, both)
    ]


def main():
    table = Table("Backend", "Lines", "Branches", "Both", title="Covered, in %")
    for row in (*BACKENDS, "together"):
        backends = BACKENDS if row == "together" else [row]
        files = [f for b in backends for f in glob.glob(f"{FOLDER}/{b}.*")]
        if files:
            table.add_row(row, *shares(files, set(BACKENDS) - set(backends)))
    Console().print(table)


if __name__ == "__main__":
    main()
