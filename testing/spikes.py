"""The judges of spike guards, in NumPy float64."""

import numpy as np


class Model:
    """The decisions of a `SpikeGuard`, step by step.

    Args:
        guard: The `SpikeGuard`.

    Attributes:
        norms: List of the entries in the history, at most `window`.
        skipped: Int, the number of outliers.
    """

    def __init__(self, guard):
        self.guard, self.norms, self.in_a_row, self.skipped = guard, [], 0, 0

    def limit(self):
        values = np.array(self.norms, "float64")
        deviation = max(values.std(ddof=1), values.mean() * 2.0**-18)
        return values.mean() + self.guard.threshold * deviation

    def applies(self, norm):
        """Returns whether a step with a finite norm is applied; remembers the norm."""
        guard, entry, is_spike = self.guard, norm, False
        warmup = min(guard.warmup, guard.window)
        if len(self.norms) >= warmup and norm > self.limit():
            is_spike = self.in_a_row < guard.window
            entry = self.limit() if is_spike else norm
        if guard.max_norm is not None and norm > guard.max_norm:
            is_spike = True
        if guard.max_norm is not None:
            entry = min(entry, guard.max_norm)
        self.norms = [*self.norms, entry][-guard.window :]
        self.in_a_row = self.in_a_row + 1 if is_spike else 0
        self.skipped += is_spike
        return not is_spike


def by_olmo(norms, window, threshold):
    """The decisions of OLMo-core's `SkipStepOptimizer`, from gradient norms only.

    Outliers enter its history unchanged. It judges from half a window on.
    """
    decisions = []
    for i, norm in enumerate(norms):
        before = np.array(norms[max(0, i - window) : i], "float64")
        if len(before) < max(2, window // 2):
            decisions.append(True)
            continue
        decisions.append(bool(norm - before.mean() <= threshold * before.std(ddof=1)))
    return decisions


def by_levanter(norms, window, threshold):
    """The decisions of levanter's `SkipStepConfig`, from gradient norms only.

    Its history has only applied steps. It uses the population's standard deviation.
    """
    history, decisions = [], []
    for norm in norms:
        values = np.array(history[-window:], "float64")
        calm = True
        if len(values) >= window // 2:
            calm = bool(norm <= values.mean() + threshold * values.std())
        decisions.append(calm)
        if calm:
            history.append(norm)
    return decisions
