"""The step of a schedule, kept as an integer for as long as possible.

float32 holds only the integers up to 2**24. Steps are therefore subtracted, compared
and counted as integers. The curves of `_curves.py` divide the results.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_lso._core.checks import LARGEST_STEP

# The largest float32 that is an int32.
_LARGEST_FLOAT32 = 2**31 - 128


class Steps(NamedTuple):
    """A number of steps: an int32 of at most `LARGEST_STEP`, and a float32 fraction."""

    whole: Any
    fraction: Any = None  # For integers.

    def since(self, start):
        """Returns the `Steps` since the step `start`, an int."""
        if start == 0:
            return self
        start = min(max(start, -LARGEST_STEP), LARGEST_STEP)
        # Otherwise the first or the last steps would wrap around.
        first, last = max(start, 0) - LARGEST_STEP, min(start, 0) + LARGEST_STEP
        return self._replace(whole=ops.clip(self.whole, first, last) - start)

    def is_before(self, end):
        """Returns whether there are fewer steps than `end`, an int."""
        return self.whole < min(end, LARGEST_STEP)

    def rounded_up(self):
        """Returns the number of steps as an int32 tensor."""
        if self.fraction is None:
            return self.whole
        return self.whole + ops.cast(self.fraction > 0, "int32")

    def in_float32(self):
        """Returns the number of steps in float32."""
        count = ops.cast(self.whole, "float32")
        return count if self.fraction is None else count + self.fraction

    def clipped(self, first=0, last=LARGEST_STEP):
        """Returns the steps between two ints."""
        whole = ops.clip(self.whole, first, last)
        if self.fraction is None:
            return Steps(whole)
        is_between = (self.whole >= first) & (self.whole < last)
        return Steps(whole, self.fraction * ops.cast(is_between, "float32"))

    def left_to(self, point):
        """Returns `point - steps` in float32, for a float between two steps."""
        whole = math.floor(point)
        left = ops.cast(whole - self.whole, "float32") + (point - whole)
        return left if self.fraction is None else left - self.fraction

    def left_and_done(self, total):
        """Returns `total - steps` and `steps` in float32; at the end 0 and `total`."""
        end = min(total, LARGEST_STEP)
        # Long before the first step the difference would wrap around.
        steps = self.clipped(end - LARGEST_STEP, end)
        return steps._both_in_float32(end - steps.whole, total - end)

    def left_and_done_of_cycles(self, length):
        """Returns `left_and_done` of the cycles so far, in which last steps count."""
        end = min(length, LARGEST_STEP)
        steps = self.clipped()
        last = ops.maximum(steps.rounded_up(), 1)
        left = end - 1 - (last - 1) % end + (last - steps.whole)
        return steps._both_in_float32(left, length - end)

    def _both_in_float32(self, left, beyond):
        left = ops.cast(left, "float32")
        if beyond > 0:
            left = left + float(beyond)
        if self.fraction is not None:
            left = left - self.fraction
        return left, self.in_float32()


def as_tensor(step):
    """Returns a step as an int32, int64, float32 or float64 tensor."""
    if isinstance(step, int):
        # The int may be too large for a float.
        step = min(max(step, -LARGEST_STEP), LARGEST_STEP)
    # JAX would wrap large ints around, and turn `np.float64(2**24 + 1)` into 2**24.
    if isinstance(step, int | float | np.generic | np.ndarray):
        step = np.clip(np.asarray(step, "float64"), -LARGEST_STEP, LARGEST_STEP)
        step = step.astype("int32" if np.all(step == np.floor(step)) else "float32")
    step = ops.convert_to_tensor(step)
    dtype = keras.backend.standardize_dtype(step.dtype)
    if dtype in ("uint32", "uint64"):
        step = ops.where(step > LARGEST_STEP, LARGEST_STEP, step)
    if dtype in ("int32", "int64", "float32", "float64"):
        return step
    return ops.cast(step, "float32" if "float" in dtype else "int32")


def elapsed(step, offset=0):
    """Returns the `Steps` since an offset."""
    step = as_tensor(step)
    dtype = keras.backend.standardize_dtype(step.dtype)
    if dtype == "int64":
        step = ops.cast(ops.clip(step, -LARGEST_STEP, LARGEST_STEP), "int32")
    if "int" in dtype:
        return Steps(step).since(offset)
    largest = LARGEST_STEP if dtype == "float64" else _LARGEST_FLOAT32
    step = ops.clip(step, -largest, largest)
    # Not `ops.floor`, whose result for float64 is float32 on PyTorch.
    whole = ops.cast(step, "int32")
    # The cast rounds towards 0.
    whole = whole - ops.cast(ops.cast(whole, dtype) > step, "int32")
    fraction = ops.cast(step - ops.cast(whole, dtype), "float32")
    return Steps(whole, fraction).since(offset)
