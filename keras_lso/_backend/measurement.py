"""`Measurement`: what a step knows of its gradients once it has read them."""

from typing import Any, NamedTuple


class Measurement(NamedTuple):
    """The results of one read of the gradients, as device tensors.

    A backend returns the cheaper one of the two lists of norms, or none. The step
    computes the norms that it needs and that are missing.

    Attributes:
        finite: Boolean scalar, the same on all replicas, processes and shards. Whether
            the gradients are finite, and are so once they are unscaled.
        gradient_norms: List of float32 scalars, the L2 norms of the unscaled gradients.
        rule_norms: List of what `Framework.norms_of` returns, one for each gradient.
        amax: Float32 scalar, the largest magnitude of the scaled gradients.
        norm: Float32 scalar, the L2 norm of all unscaled gradients together.
    """

    finite: Any
    gradient_norms: list | None = None
    rule_norms: list | None = None
    amax: Any = None
    norm: Any = None
