"""The common parts of the reports' tables: their width, and the form of numbers."""

import io
from collections.abc import Iterable
from typing import Any

from rich.box import Box
from rich.console import Console
from rich.table import Table

# `rich.box.SIMPLE_HEAD` with hyphens for its dashes, since a user may print a report,
# or write it to a file, in an encoding without dashes, such as cp1252.
_RULED = Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)


def new_table(first: str, headings: Iterable[str]) -> Any:
    """Returns a table without rows: paths of layers, then columns of numbers."""
    table = Table(box=_RULED, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def text_of(*renderables: Any) -> str:
    """Returns tables and lines as text, at most 80 characters a line."""
    stream = io.StringIO()
    # In a notebook, rich would display the table instead of writing it to the stream,
    # and notebooks ask for colours, which do not belong into a text.
    console = Console(file=stream, width=80, force_jupyter=False, force_terminal=False)
    for renderable in renderables:
        console.print(renderable, highlight=False, markup=False)
    # The names of layers may come from the file of a stranger, with characters that
    # would move the cursor of a terminal.
    return "\n".join(
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line.rstrip())
        for line in stream.getvalue().splitlines()
    )


def scale_text(value: float) -> str:
    """Returns a power of two as `2**15`, any other scale in digits."""
    mantissa, exponent = float(value).hex().split("p")
    return f"2**{int(exponent)}" if mantissa == "0x1.0000000000000" else f"{value:.3g}"


def share_text(value: float) -> str:
    """Returns a share as a percentage."""
    return "" if value == 0 else "<0.1%" if value < 0.001 else f"{value:.1%}"
