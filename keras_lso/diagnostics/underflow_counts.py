"""Counts of the values that float16 flushes, rounds or overflows, at given scales.

Unlike `underflow.py`, this module needs neither a model nor a backend.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# Half of the smallest subnormal number: values up to it are rounded to zero.
FLUSHED_UP_TO = 2.0**-25
# Half a spacing below the smallest normal number: values from it on are rounded to
# that number, or are normal themselves.
SUBNORMAL_BELOW = 2.0**-14 - 2.0**-25
# Half a spacing above the largest number, 65504: values from it on are rounded to inf.
OVERFLOWS_FROM = 65520.0
# The share of a layer's values that may be flushed to zero at a safe scale.
TOLERATED = 0.01
NOT_FINITE = (
    "The gradients contain inf or NaN in float32 already: first look for their source."
)


@dataclass
class GradientCounts:
    """The effect of float16 on the gradients of a layer, at each scale.

    Attributes:
        values: Int. The number of values that are not zero in float32.
        smallest: Float, the smallest magnitude. None if there are no values.
        median: Float, the median magnitude. None if there are no values.
        largest: Float, the largest magnitude. Inf or NaN if a value is not finite.
        flushed: List of floats, the share that would be zero at each scale.
        subnormal: List of floats, the share that would be subnormal at each scale.
        overflowing: List of floats, the share that would be inf at each scale, or is
            not finite.
        lowest_safe_scale: Float. The lowest scale at which at most 1% are flushed.
        highest_safe_scale: Float. The highest scale at which no value overflows; 0 if
            a value is not finite.
    """

    values: int
    smallest: float | None
    median: float | None
    largest: float | None
    flushed: list[float]
    subnormal: list[float]
    overflowing: list[float]
    lowest_safe_scale: float
    highest_safe_scale: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as a dict."""
        return asdict(self)


def all_finite(counts: Iterable[GradientCounts]) -> bool:
    """Whether all gradients are finite in float32."""
    return all(found.highest_safe_scale > 0 for found in counts)


def counts_of(arrays: Iterable[ArrayLike], scales: Sequence[float]) -> GradientCounts:
    """Returns the `GradientCounts` of a list of float32 arrays at a list of scales."""
    magnitudes = np.abs(np.concatenate([np.ravel(a) for a in arrays]), dtype="float64")
    # NumPy sorts NaN to the end, behind inf.
    values = np.sort(magnitudes[magnitudes != 0])
    count = len(values)
    if not count:
        zeros = [0.0] * len(scales)
        return GradientCounts(0, None, None, None, zeros, zeros, zeros, 0.0, np.inf)
    factors = np.asarray(scales, "float64")
    flushed = np.searchsorted(values, FLUSHED_UP_TO / factors, side="right")
    small = np.searchsorted(values, SUBNORMAL_BELOW / factors, side="left")
    fitting = np.searchsorted(values, OVERFLOWS_FROM / factors, side="left")
    largest = float(values[-1])
    # The first value that must not be flushed.
    first = float(values[int(TOLERATED * count)])
    return GradientCounts(
        values=count,
        smallest=float(values[0]),
        median=float(values[count // 2]),
        largest=largest,
        flushed=(flushed / count).tolist(),
        subnormal=((small - flushed) / count).tolist(),
        overflowing=((count - fitting) / count).tolist(),
        lowest_safe_scale=FLUSHED_UP_TO / first if np.isfinite(first) else np.inf,
        highest_safe_scale=65504.0 / largest if np.isfinite(largest) else 0.0,
    )
