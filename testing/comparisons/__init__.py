"""The comparison of each override of a backend with the default that it replaces.

A comparison takes the functions, or the values, of both. To write one, decorate it with
`compares` and the names of the overrides that it is for.
"""

from testing.comparisons import (  # noqa: F401
    gradients,
    host,
    masters,
    replicas,
    scalars,
    steps,
)
from testing.comparisons.registry import COMPARISONS, comparison_of, overrides

__all__ = ["COMPARISONS", "comparison_of", "overrides"]
