"""The table that a `Float16Report` prints, and the words below it.

It is a separate module since importing rich takes a while.
"""

import math
from typing import TYPE_CHECKING

from keras_lso.diagnostics.tables import new_table, scale_text, share_text, text_of
from keras_lso.diagnostics.underflow_counts import NOT_FINITE, all_finite

if TYPE_CHECKING:
    from keras_lso.diagnostics.float16 import Float16Report

HEADINGS = ("largest", "in\nfloat16", "headroom\n2**", "flushed", "inf,\nNaN")


def table_of(report: "Float16Report") -> str:
    """Returns the table and the words as text."""
    gradients: tuple[str, ...] = ()
    if report.loss_scale is not None:
        at = f"at {scale_text(report.loss_scale)}"
        gradients = f"gradients\nflushed\n{at}", f"\noverflow\n{at}"
    table = new_table("layer", ("of its", *HEADINGS, *gradients))
    for path, found in report.layers.items():
        counts = found.gradients
        shares = ("",) * len(gradients)
        if gradients and counts is not None:
            shares = share_text(counts.flushed[0]), share_text(counts.overflowing[0])
        table.add_row(path, *_cells(found), *shares)
    return text_of(table, *_words(report))


def _cells(found):
    """Returns the row of a layer: its part with the least headroom."""
    tightest = found.tightest
    if tightest is None:
        largest = found.outputs.largest if found.outputs else 0.0
        return found.compute_dtype, f"{largest:.2g}", "", "", "", ""
    name, magnitudes = tightest
    is_finite = math.isfinite(magnitudes.largest_in_float16)
    not_finite = sum(m.not_finite_in_float16 for _, m in found.parts())
    return (
        name,
        f"{magnitudes.largest:.2g}",
        f"{magnitudes.largest_in_float16:.2g}" if is_finite else "inf, NaN",
        "" if magnitudes.headroom == math.inf else f"{magnitudes.headroom:+.1f}",
        share_text(max(m.flushed for _, m in found.parts())),
        f"{not_finite:,}" if not_finite else "",
    )


def _words(report):
    keep = report.layers_to_keep
    for path, found in report.layers.items():
        for line in (*found.reasons, *found.notes):
            yield f"{path}: {line}."
    reasons = any(found.reasons for found in report.layers.values())
    parts = [m for found in report.layers.values() for _, m in found.parts()]
    if keep:
        yield f"Keep in float32, or in bfloat16: {', '.join(keep)}."
    elif reasons:
        yield (
            "No layer can be kept in float32 instead. Scale the inputs of the model, "
            "and move computations from outside its layers into a layer."
        )
    elif any(magnitudes.not_finite for magnitudes in parts):
        yield "Nothing fails only in float16. First look for the source of inf or NaN."
    else:
        yield "Every layer fits into float16."
    if not all_finite(v.gradients for v in report.layers.values() if v.gradients):
        yield NOT_FINITE
    elif report.recommended_scale is not None:
        scale = scale_text(report.recommended_scale)
        yield f"Recommended initial_scale: {scale}."
