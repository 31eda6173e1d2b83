"""The magnitudes of tensors, in float32 and in float16, over several batches.

Unlike `layer_watch.py`, this module needs neither a model nor a backend.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_lso.diagnostics.underflow_counts import FLUSHED_UP_TO

FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class Reading:
    """One computed tensor: its dtype, and sums and extremes of its values.

    Attributes:
        dtype: String.
        not_finite: Int. The number of values that are inf or NaN.
        values: Int. The number of finite nonzero values.
        largest: Float. The largest magnitude of the finite values, 0 without any.
        flushed: Int. The number of finite nonzero values that float16 would flush to
            zero.
        total: Float. The sum of the magnitudes of the finite values.
        lost: Float. The part of the sum that would be flushed to zero.
    """

    dtype: str
    not_finite: int
    values: int
    largest: float
    flushed: int
    total: float
    lost: float


def reading_of(array: ArrayLike, dtype: str) -> Reading:
    """Returns the `Reading` of an array, whose values were computed in `dtype`."""
    magnitudes = np.abs(np.ravel(array).astype("float64"))
    finite = magnitudes[np.isfinite(magnitudes)]
    values = finite[finite != 0]
    flushed = values[values <= FLUSHED_UP_TO]
    return Reading(
        dtype=dtype,
        not_finite=magnitudes.size - finite.size,
        values=values.size,
        largest=float(values.max(initial=0.0)),
        flushed=flushed.size,
        total=float(values.sum()),
        lost=float(flushed.sum()),
    )


@dataclass
class Magnitudes:
    """Values of one kind: inputs, weights or outputs of a layer, or results of an op.

    Attributes:
        is_float16: Bool. Whether the values are in float16 when the model computes in
            float16.
        largest: Float. The largest magnitude in float32.
        largest_in_float16: Float. The largest magnitude in float16; inf if a value is
            inf or NaN in float16.
        not_finite: Int. The number of values that are inf or NaN in float32 already.
        not_finite_in_float16: Int. The number of values that are inf or NaN in float16.
        flushed: Float. The share of the nonzero values that float16 flushes to zero.
        lost: Float. The share of the sum of magnitudes that is flushed to zero. It is
            small if the values that matter are kept.
    """

    is_float16: bool = False
    largest: float = 0.0
    largest_in_float16: float = 0.0
    not_finite: int = 0
    not_finite_in_float16: int = 0
    flushed: float = 0.0
    lost: float = 0.0

    def __post_init__(self) -> None:
        self._sums = np.zeros(4)

    @property
    def headroom(self) -> float:
        """Float. Powers of two between the largest value and the largest float16.

        Below 0 the values overflow; inf if all are zero.
        """
        return math.log2(FLOAT16_MAX / self.largest) if self.largest else math.inf

    def add(self, wide: Reading, narrow: Reading) -> None:
        """Adds the readings of a tensor in float32 and in float16."""
        if narrow.dtype == "float16" and not self.is_float16:
            # Readings in float32 are discarded.
            vars(self).update(vars(Magnitudes(is_float16=True)))
        elif self.is_float16 and narrow.dtype != "float16":
            return  # A float32 value of the layer can have any magnitude.
        self.largest = max(self.largest, wide.largest)
        self.not_finite += wide.not_finite
        self.not_finite_in_float16 += narrow.not_finite
        in_float16 = math.inf if narrow.not_finite else narrow.largest
        self.largest_in_float16 = max(self.largest_in_float16, in_float16)
        self._sums += wide.flushed, wide.values, wide.lost, wide.total
        flushed, values, lost, total = self._sums
        self.flushed = float(flushed / values) if values else 0.0
        self.lost = float(lost / total) if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as a dict, ready for JSON except for inf."""
        names = self.__dataclass_fields__
        return {
            **{name: getattr(self, name) for name in names},
            "headroom": self.headroom,
        }
