"""`Measurement`: the facts that a step learns by one read of its gradients."""

from typing import Any, NamedTuple


class Measurement(NamedTuple):
    """The results of one read of the gradients, as device tensors."""

    # Whether they are finite, also once unscaled: the same on all replicas and shards.
    finite: Any
    # A result of `Framework.norms_of` for each gradient; None: the update computes it.
    rule_norms: list | None = None
    # The largest magnitude of the scaled gradients.
    amax: Any = None
    # The L2 norm of all unscaled gradients, even where its square is not in float32.
    norm: Any = None
