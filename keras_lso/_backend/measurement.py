"""`Measurement`: the facts that a step learns by one read of its gradients."""

from typing import Any, NamedTuple


class Measurement(NamedTuple):
    """The results of one read of the gradients, as device tensors.

    A backend returns the cheaper of the two lists of norms, or neither. The step
    computes any other norms that it needs.

    Attributes:
        finite: Boolean scalar, the same on all replicas, processes and shards. Whether
            the gradients are finite, both before and after they are unscaled.
        gradient_norms: List of float32 scalars, the L2 norms of the unscaled gradients.
        rule_norms: List of the results of `Framework.norms_of`, one for each gradient.
        amax: Float32 scalar, the largest magnitude of the scaled gradients.
        norm: Float32 scalar, the L2 norm of all unscaled gradients together, right even
            where its square exceeds the range of float32.
    """

    finite: Any
    gradient_norms: list | None = None
    rule_norms: list | None = None
    amax: Any = None
    norm: Any = None
