"""`SpikeHistory`: the norms by which a `SpikeGuard` decides, and its decisions."""

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

    def __init__(self, optimizer):
        self._guard = guard = optimizer.spike_guard
        self._inner = optimizer.inner_optimizer
        add = functools.partial(
            optimizer.add_variable,
            initializer="zeros",
            aggregation="only_first_replica",
        )
        self._norms = add(shape=(guard.window,), dtype="float32", name="spike_norms")
        self._counts = add(shape=(3,), dtype="int", name="spike_counts")
        self.variables = [self._norms, self._counts]

    def check_accumulation(self):
        """Raises an error if several optimizers each accumulate gradients."""
        members = members_of(self._inner)
        if any(member.gradient_accumulation_steps for member in members):
            raise ValueError(
                "A SpikeGuard judges the mean gradient of a window, but each member of "
                "a MultiOptimizer has its own window. Leave out `spike_guard`, or the "
                "`gradient_accumulation_steps` of the members. Received: "
                f"{len(members)} members"
            )

    @property
    def skipped(self):
        """The number of outliers that were skipped, an integer scalar tensor."""
        return ops.copy(ops.convert_to_tensor(self._counts)[2])

    def judge(self, norm, finite):
        """Returns False for an outlier, and remembers the norm of a finite step."""
        xp, window = backend.xp, self._guard.window
        max_norm = self._guard.max_norm
        is_too_large = None if max_norm is None else norm > max_norm
        # The norm of finite gradients may be infinite, and a history of it no number.
        norm = xp.clip(norm, 0.0, _LARGEST)
        norms, counts = read(self._norms), read(self._counts)
        # The norms that entered the ring, a number that wraps from `2 * window - 1` to
        # `window`; the outliers in a row; the skipped steps.
        seen, in_a_row, skipped = counts[0], counts[1], counts[2]
        limit = self._limit(norms, seen)
        is_judged = seen >= min(self._guard.warmup, window)
        is_above = xp.logical_and(is_judged, norm > limit)
        is_spike = xp.logical_and(is_above, in_a_row < window)
        # An outlier enters the history as the limit that it exceeds: see `SpikeGuard`.
        entry = xp.where(is_spike, limit, norm)
        if is_too_large is not None:
            is_spike = xp.logical_or(is_spike, is_too_large)
            entry = xp.clip(entry, 0.0, max_norm)
        is_spike = xp.logical_and(finite, is_spike)
        is_next = ops.arange(window, dtype=counts.dtype) == seen % window
        is_next = xp.logical_and(is_next, finite)
        spike = xp.cast(is_spike, counts.dtype)
        wraps = xp.cast(seen + 1 >= 2 * window, counts.dtype)
        counts = [
            xp.where(finite, seen + 1 - window * wraps, seen),
            xp.where(finite, (in_a_row + 1) * spike, in_a_row),
            skipped + spike,
        ]
        self._inner.assign(self._norms, xp.where(is_next, entry, norms))
        self._inner.assign(self._counts, ops.stack(counts))
        return xp.logical_not(is_spike)

    def _limit(self, norms, seen):
        """Returns the largest norm that is not an outlier, a float32 scalar tensor."""
        xp, window = backend.xp, self._guard.window
        places = ops.arange(window, dtype=seen.dtype)
        # In units of the largest norm, whose square may exceed the range of float32.
        largest = ops.max(norms)
        unit = xp.where(largest > 0, largest, xp.ones_like(largest))
        values = norms / unit
        count = xp.cast(xp.clip(seen, 0, window), "float32")
        mean = ops.sum(values) / xp.clip(count, 1.0, window)
        off = xp.where(places < seen, values - mean, xp.zeros_like(values))
        variance = ops.sum(off * off) / xp.clip(count - 1, 1.0, window)
        deviation = xp.maximum(xp.sqrt(variance), mean * _ROUNDING)
        return (mean + deviation * self._guard.threshold) * unit
