"""The judges of spike guards, in NumPy float64."""

import numpy as np


class Model:
    """The decisions of a `SpikeGuard`, step by step."""

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


# What tells these rules apart: the delta degrees of freedom of the standard deviation,
# and whether a skipped step is multiplied by 0. Read in OLMo-core from 2024-09 to
# 2026-06 (`SkipStepOptimizer`, `SkipStepAdamW`), levanter from 2025-05 to 2025-09
# (`SkipStepConfig`) and MaxText from 2026-03 to 2026-08 (`skip_step_on_spikes`).
PEERS = {"OLMo-core": (1, True), "levanter": (0, True), "MaxText": (1, False)}


def by_peer(peer, norms, window=128, threshold=6.0):
    """The decisions of a peer from gradient norms only, and the weight at the end.

    Each norm enters the history, also an outlier or a NaN. The weight begins at 0, and
    the norms are its gradients, at a learning rate of 1.
    """
    delta, multiplies = PEERS[peer]
    decisions, weight = [], 0.0
    for i, norm in enumerate(norms):
        before = np.array(norms[max(0, i - window) : i], "float64")
        # levanter does not count the step that it judges.
        is_usual = len(before) + (peer != "levanter") < max(2, window // 2)
        if not is_usual:
            limit = before.mean() + threshold * before.std(ddof=delta)
            is_usual = bool(norm <= limit)
        decisions.append(is_usual)
        weight -= is_usual * norm if multiplies else np.where(is_usual, norm, 0.0)
    return decisions, float(weight)
