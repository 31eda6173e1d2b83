"""The table that an `UnderflowReport` prints.

It is apart from `underflow.py`, since it imports rich, which takes a while.
"""

import io
import math

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 100


def table_of(report):
    """Returns the table as text, at most `WIDTH` characters a line."""
    at_one, at_best = _index(report, 1.0), _index(report, report.initial_scale)
    best = f"at {_scale(report.scales[at_best])}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("layer", overflow="fold")
    headings = [f"flushed\nat {_scale(report.scales[at_one])}"]
    headings += [f"{share}\n{best}" for share in ("flushed", "subnormal", "overflow")]
    for heading in ("median", *headings, "safe scales"):
        table.add_column(heading, justify="right", no_wrap=True)
    for path, counts in report.layers.items():
        shares = counts.flushed, counts.subnormal, counts.overflowing
        table.add_row(
            path,
            "" if counts.median is None else f"{counts.median:.0e}",
            _share(counts.flushed[at_one]),
            *(_share(share[at_best]) for share in shares),
            _safe(counts.lowest_safe_scale, counts.highest_safe_scale),
        )
    stream = io.StringIO()
    # In a notebook rich would show the table there, and write nothing here; and
    # notebooks ask for colours, which are no part of a text.
    plain = {"force_jupyter": False, "force_terminal": False}
    console = Console(file=stream, width=WIDTH, **plain)
    console.print(table)
    scales = report.safe_scales
    safe = f"Safe for all layers: {_safe(*scales)}." if scales else "No scale is safe."
    best = f"Recommended initial_scale: {_scale(report.initial_scale)}."
    console.print(safe, best, highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _index(report, scale):
    """Returns the index of the nearest scale of the report, by their ratio."""
    factors = [max(other / scale, scale / other) for other in report.scales]
    return factors.index(min(factors))


def _scale(value):
    """Returns a power of two as `2**15`, any other scale in digits."""
    mantissa, exponent = float(value).hex().split("p")
    return f"2**{int(exponent)}" if mantissa == "0x1.0000000000000" else f"{value:.3g}"


def _share(value):
    return "" if value == 0 else "<0.1%" if value < 0.001 else f"{value:.1%}"


def _safe(low, high):
    """Returns the range of the powers of two between two scales."""
    if low == 0 and high == math.inf:
        return "any"
    if not 0 < low <= high < math.inf:
        return "none"
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return f"2**{first} to 2**{last}" if first <= last else "none"
