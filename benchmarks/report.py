"""Prints the tables of `benchmarks/results/steps/` as Markdown, for the documentation.

python -m benchmarks.report [FILE ...]
"""

import argparse
import pathlib

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks import evidence
from benchmarks.tables import make_tables

RESULTS = evidence.RESULTS / "steps"


def print_tables(results):
    """Prints all tables, as wide as the terminal is, or 120 characters."""
    for table in make_tables(results):
        print_table(table)


def print_table(table):
    """Prints a `Table`, and its notes."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(_rich(table))
    for note in table.notes:
        console.print(note, style="dim", highlight=False)
    console.print()


def _rich(table):
    rich = RichTable(
        title=table.title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for index, name in enumerate(table.columns):
        # Two words, two lines: the numbers below are no wider than one.
        is_number = index >= table.left
        heading = name.replace(" ", "\n", 1) if is_number else name
        rich.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for heading, rows in table.sections:
        rich.add_section()
        if heading is not None:
            rich.add_row(*heading, style="bold")
        for row in rows:
            rich.add_row(*row, style="red" if row[-1] == "NO" else None)
    return rich


def markdown(results):
    """Returns all tables as Markdown."""
    lines = []
    for table in make_tables(results):
        lines += [f"### {table.title}", ""]
        lines.append(_line(table.columns))
        lines.append(
            _line(
                "---:" if i >= table.left else "---" for i in range(len(table.columns))
            )
        )
        for heading, rows in table.sections:
            if heading is not None:
                lines.append(_line(f"**{cell}**" if cell else "" for cell in heading))
            lines += [_line(row) for row in rows]
        lines += ["", *(f"{note}\n" for note in table.notes)]
    return "\n".join(lines)


def _line(cells):
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE")
    parser.add_argument(
        "--table", action="store_true", help="print for a terminal, not as Markdown"
    )
    arguments = parser.parse_args()
    files = arguments.files or sorted(RESULTS.glob("*.json"))
    results = [evidence.read(path) for path in files]
    if not results:
        raise SystemExit(f"No results in {RESULTS.name}/: run `make bench` first.")
    if arguments.table:
        print_tables(results)
    else:
        print(markdown(results))


if __name__ == "__main__":
    main()
