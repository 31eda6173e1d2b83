"""What float16 makes of some numbers that are multiplied by a scale."""

from dataclasses import asdict, dataclass

import numpy as np

# Half of the smallest subnormal number: what is not above is rounded to zero.
FLUSHED_UP_TO = 2.0**-25
# Below the smallest normal number, less half a step, from which on it is reached.
SUBNORMAL_BELOW = 2.0**-14 - 2.0**-25
# Half a step above the largest number, 65504: from there on it is inf.
OVERFLOWS_FROM = 65520.0
# Of a layer's values, this share may be flushed to zero.
TOLERATED = 0.01


@dataclass
class GradientCounts:
    """What float16 would make of the gradients of a layer, at each scale.

    Attributes:
        values: Int. How many there are, without those that are zero in float32.
        smallest: Float, the smallest magnitude. None if there are no values.
        median: Float.
        largest: Float, inf or NaN if one of them is not finite.
        flushed: List of floats, for each scale the share that would be zero.
        subnormal: List of floats, the share that would be subnormal.
        overflowing: List of floats, the share that would be inf, or is not finite.
        lowest_safe_scale: Float. From there on at most 1% are flushed.
        highest_safe_scale: Float. Up to there none overflows; 0 if one is not finite.
    """

    values: int
    smallest: float | None
    median: float | None
    largest: float | None
    flushed: list
    subnormal: list
    overflowing: list
    lowest_safe_scale: float
    highest_safe_scale: float

    def to_dict(self):
        """Returns the attributes as a dict."""
        return asdict(self)


def counts_of(arrays, scales):
    """Returns the `GradientCounts` of some float32 arrays.

    Args:
        arrays: List of arrays.
        scales: List of floats.
    """
    magnitudes = np.abs(np.concatenate([np.ravel(a) for a in arrays]), dtype="float64")
    # NaN is sorted to the end, behind inf.
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
