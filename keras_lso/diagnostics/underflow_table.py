"""The table that an `UnderflowReport` prints.

It is a separate module since importing rich takes a while.
"""

import math
from typing import TYPE_CHECKING

from keras_lso.diagnostics.tables import new_table, scale_text, share_text, text_of
from keras_lso.diagnostics.underflow_counts import NOT_FINITE, all_finite

if TYPE_CHECKING:
    from keras_lso.diagnostics.underflow import UnderflowReport


def table_of(report: "UnderflowReport") -> str:
    """Returns the table as text."""
    at_one, at_best = _index(report, 1.0), _index(report, report.initial_scale)
    best = f"at {scale_text(report.scales[at_best])}"
    headings = [f"flushed\nat {scale_text(report.scales[at_one])}"]
    headings += [f"{share}\n{best}" for share in ("flushed", "subnormal", "overflow")]
    table = new_table("layer", ("median", *headings, "safe scales"))
    for path, counts in report.layers.items():
        shares = counts.flushed, counts.subnormal, counts.overflowing
        table.add_row(
            path,
            "" if counts.median is None else f"{counts.median:.0e}",
            share_text(counts.flushed[at_one]),
            *(share_text(share[at_best]) for share in shares),
            _safe(counts.lowest_safe_scale, counts.highest_safe_scale),
        )
    if not all_finite(report.layers.values()):
        return text_of(table, NOT_FINITE)
    scales = report.safe_scales
    safe = f"Safe for all layers: {_safe(*scales)}." if scales else "No scale is safe."
    best = f"Recommended initial_scale: {scale_text(report.initial_scale)}."
    return text_of(table, f"{safe} {best}")


def _index(report, scale):
    """Returns the index of the nearest scale of the report, by their ratio."""
    factors = [max(other / scale, scale / other) for other in report.scales]
    return factors.index(min(factors))


def _safe(low, high):
    """Returns the range of the powers of two between two scales."""
    if low == 0 and high == math.inf:
        return "any"
    if not 0 < low <= high < math.inf:
        return "none"
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return f"2**{first} to 2**{last}" if first <= last else "none"
