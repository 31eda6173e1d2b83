"""`Measurement`: the facts that a step learns by one read of its gradients."""

from typing import Any, NamedTuple


class Measurement(NamedTuple):
    """The results of one read of the gradients, as device tensors.

    Attributes:
        finite: Boolean scalar, the same on all replicas, processes and shards. Whether
            the gradients are finite, both before and after they are unscaled.
        rule_norms: List of the results of `Framework.norms_of`, one for each gradient;
            None if the update computes them.
        amax: Float32 scalar, the largest magnitude of the scaled gradients.
        norm: Float32 scalar, the L2 norm of all unscaled gradients together, right even
            where its square exceeds the range of float32.
    """

    finite: Any
    rule_norms: list | None = None
    amax: Any = None
    norm: Any = None
