"""The text that a `Recommendation` prints: the settings, and a table of bytes.

It is a separate module since importing rich takes a while.
"""

from typing import TYPE_CHECKING

from keras_lso.diagnostics.tables import new_table, scale_text, text_of

if TYPE_CHECKING:
    from keras_lso.diagnostics.recommendation import Recommendation

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def text_of_recommendation(found: "Recommendation") -> str:
    """Returns the text of a `Recommendation`."""
    rows = {
        "hardware": found.hardware,
        "dtype policy": found.dtype_policy,
        "layers in float32": ", ".join(found.layers_in_float32) or "none",
        "optimizer": _optimizer(found),
        "masters": found.master_weights or "none",
    }
    if found.dtype_policy == "float32":
        rows["layers in float32"] = "all"
    width = max(map(len, rows)) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows.items()]
    table = new_table("bytes of", ("now", "recommended"))
    for kind, now in found.bytes_now.items():
        table.add_row(kind, bytes_text(now), bytes_text(found.bytes[kind]))
    totals = (sum(found.bytes_now.values()), sum(found.bytes.values()))
    table.add_row("all", *map(bytes_text, totals))
    return text_of(*lines, table, *found.reasons)


def _optimizer(found):
    if found.optimizer is None:
        return "unchanged, without loss scaling"
    if found.initial_scale is None:
        return f"keras_lso.{found.optimizer}(inner_optimizer)"
    scale = f"initial_scale={scale_text(found.initial_scale)}"
    return f"keras_lso.{found.optimizer}(inner_optimizer, {scale})"


def bytes_text(count: int) -> str:
    """Returns a number of bytes in the largest unit that it reaches."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"
