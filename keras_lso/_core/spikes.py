"""The history of a `SpikeGuard` on the device, and its judgement of the next step."""

import functools

from keras import ops

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import members_of
from keras_lso._keras_internals.variables import read

# XLA multiplies by an inverse, which must not be subnormal.
_LARGEST = 2.0**120
# The share of the mean by which equal norms may differ.
_ROUNDING = 2.0**-18


class SpikeHistory:
    """The last norms of an optimizer's gradients, and the number of outliers."""

    def __init__(self, guard, add_variable, assign):
        self._guard, self._assign = guard, assign
        add = functools.partial(
            add_variable, initializer="zeros", aggregation="only_first_replica"
        )
        self._norms = add(shape=(guard.window,), dtype="float32", name="spike_norms")
        self._counts = add(shape=(3,), dtype="int", name="spike_counts")
        self.variables = [self._norms, self._counts]

    @property
    def skipped(self):
        """The number of outliers that were skipped, an integer scalar tensor."""
        return ops.copy(ops.convert_to_tensor(self._counts)[2])

    def reset(self):
        """Forgets all norms and counts."""
        for variable in self.variables:
            variable.assign(ops.zeros(variable.shape, variable.dtype))

    def judge(self, norm, finite):
        """Returns False for an outlier, and remembers the norm of a finite step."""
        scalars, window = backend.scalars, self._guard.window
        # The norm of finite gradients may be infinite, and a history of it no number.
        norm = scalars.clip(norm, 0.0, _LARGEST)
        norms, counts = read(self._norms), read(self._counts)
        # The norms that entered the ring, a number that wraps from `2 * window - 1` to
        # `window`; the outliers in a row; the skipped steps.
        seen, in_a_row, skipped = counts[0], counts[1], counts[2]
        limit = self._limit(norms, seen)
        is_judged = seen >= min(self._guard.warmup, window)
        is_above = scalars.logical_and(is_judged, norm > limit)
        is_spike = scalars.logical_and(is_above, in_a_row < window)
        # An outlier enters the history as the limit that it exceeds: see `SpikeGuard`.
        entry = scalars.where(is_spike, limit, norm)
        if self._guard.max_norm is not None:
            is_spike = scalars.logical_or(is_spike, norm > self._guard.max_norm)
            entry = scalars.clip(entry, 0.0, self._guard.max_norm)
        is_spike = scalars.logical_and(finite, is_spike)
        is_next = ops.arange(window, dtype=counts.dtype) == seen % window
        is_next = scalars.logical_and(is_next, finite)
        one, none = scalars.ones_like(seen), scalars.zeros_like(seen)
        counted = scalars.where(seen + 1 >= 2 * window, one * window, seen + 1)
        streak = scalars.where(is_spike, in_a_row + 1, none)
        counts = [
            scalars.where(finite, counted, seen),
            scalars.where(finite, streak, in_a_row),
            scalars.where(is_spike, skipped + 1, skipped),
        ]
        self._assign(self._norms, scalars.where(is_next, entry, norms))
        self._assign(self._counts, ops.stack(counts))
        return scalars.logical_not(is_spike)

    def _limit(self, norms, seen):
        """Returns the largest norm that is not an outlier, a float32 scalar tensor."""
        scalars, window = backend.scalars, self._guard.window
        places = ops.arange(window, dtype=seen.dtype)
        # In units of the largest norm, whose square may exceed the range of float32.
        largest = ops.max(norms)
        unit = scalars.where(largest > 0, largest, scalars.ones_like(largest))
        values = norms / unit
        most = scalars.ones_like(seen) * window
        count = scalars.cast(scalars.where(seen < window, seen, most), "float32")
        mean = ops.sum(values) / scalars.maximum(count, scalars.ones_like(count))
        zeros = scalars.zeros_like(values)
        off = scalars.where(places < seen, values - mean, zeros)
        one = scalars.ones_like(count)
        variance = ops.sum(off * off) / scalars.maximum(count - 1, one)
        deviation = scalars.maximum(scalars.sqrt(variance), mean * _ROUNDING)
        return (mean + deviation * self._guard.threshold) * unit


def check_windows(optimizer):
    """Raises an error if several optimizers each accumulate gradients in windows."""
    members = members_of(optimizer)
    if any(member.gradient_accumulation_steps for member in members):
        raise ValueError(
            "A SpikeGuard judges the mean gradient of a window, but each member of a "
            "MultiOptimizer has its own window. Leave out `spike_guard`, or the "
            "`gradient_accumulation_steps` of the members. Received: "
            f"{len(members)} members"
        )
