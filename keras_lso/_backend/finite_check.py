"""One read of the gradients, with a proof instead of a check where that is possible.

A finite norm or sum proves that all elements are finite, at a third of the cost of
`isfinite` on a CPU. One that is not finite proves nothing (1e20 squared is inf), nor
does any if unscaling enlarges the gradients. Then every element is checked.
"""

from collections.abc import Callable
from itertools import repeat
from typing import Any, TypeAlias

from keras import ops

from keras_lso._backend.framework import Framework, GradientStats, MeasureOptions
from keras_lso._backend.rule import RuleNorms, rule_norms
from keras_lso._backend.tensors import (
    PROOF,
    Tensor,
    amax_of,
    in_float32,
    is_usual,
    joint_norm,
    norm_of_all,
    pack,
    times,
)

# A float16 times a factor below this is finite.
PROOF_OF_FLOAT16 = 2.0**111


Branch: TypeAlias = Callable[..., Tensor]


class FiniteCheck:
    """How a backend proves that gradients are finite. All tensors are dense."""

    def cond(
        self, flag: Tensor, if_true: Branch, if_false: Branch, *operands: Any
    ) -> Tensor:
        """Returns what one of two functions of the operands returns."""

    def norm(self, values: Tensor) -> Tensor:
        """Returns the L2 norm of one tensor."""

    def bound(self, values: Tensor) -> Tensor:
        """Returns a norm that takes least time; no magnitude exceeds it."""
        return self.norm(values)

    def is_proven(self, values: Tensor) -> Tensor:
        """Returns a boolean. True proves that all values are finite."""

    def measure(
        self, framework: Framework, values: list[Tensor], options: MeasureOptions
    ) -> GradientStats:
        """See `Framework.measure`; the norms of `options.rules` cost nothing here."""
        inv_scale = ops.convert_to_tensor(options.inv_scale, dtype="float32")
        norm: Tensor = None
        bound = norms = None
        if options.norm or options.clips:
            packs = _packs_in_float32(values)
            bound = norm_of_all([self.norm(p) for p in packs])
            # A norm of the gradient alone is unscaled afterwards: XLA adds up gradients
            # three times as fast as their products.
            norm = self.cond(is_usual(bound), _usual, _joint, bound, packs) * inv_scale
        if options.rules and options.leaves:
            unscaled = [times(v, inv_scale) for v in values]
            norms = rule_norms(framework, options.rules, unscaled, options.leaves)
        if options.clips:
            finite = ops.isfinite(ops.square(norm * options.headroom))
        else:
            factor = inv_scale * options.headroom
            if bound is None and options.headroom > 1 and not _are_in_float16(values):
                bound = norm_of_all([self.bound(p) for p in _packs_in_float32(values)])
            if bound is None:
                is_proven = self._are_proven(values, factor, norms)
            else:
                is_proven = bound * factor < PROOF
            finite = self.cond(is_proven, _true, _all_finite, values, factor)
        amax = amax_of(pack(values)) if options.amax else None
        return GradientStats(finite, norms, amax, norm)

    def _are_proven(
        self, values: list[Tensor], factor: Tensor, rule_norms: RuleNorms | None
    ) -> Tensor:
        """Returns a boolean. True proves that values times the factor are finite."""
        # Of the values alone, by their norms where there are: the factor must be small.
        pairs = list(zip(values, rule_norms or repeat(None), strict=False))
        packs = pack([v for v, norms in pairs if norms is None])
        of_norms = [ops.isfinite(norms[0]) for _, norms in pairs if norms is not None]
        proofs = ops.stack([*map(self.is_proven, packs), *of_norms])
        limit = 1.0
        if _are_in_float16(values) and not rule_norms:
            limit = PROOF_OF_FLOAT16
        return ops.logical_and(ops.all(proofs), factor <= limit)


def _are_in_float16(values: list[Tensor]) -> bool:
    """Whether all tensors are in float16."""
    return all(v.dtype == "float16" for v in values)


def _packs_in_float32(values: list[Tensor]) -> list[Tensor]:
    """Returns the packs of the tensors, in float32 or wider."""
    return [in_float32(p) for p in pack(values)]


# At module level, since JAX recompiles a `cond` of new functions outside `jax.jit`.


def _usual(plain: Tensor, packs: list[Tensor]) -> Tensor:
    """Returns the norm from plain squares."""
    return plain


def _joint(plain: Tensor, packs: list[Tensor]) -> Tensor:
    """Returns the norm from squares in three units."""
    return joint_norm(packs)


def _true(values: list[Tensor], factor: Tensor) -> Tensor:
    """Returns that all values are finite."""
    return ops.convert_to_tensor(True, dtype="bool")


def _all_finite(values: list[Tensor], factor: Tensor) -> Tensor:
    """Returns whether all values times the factor are finite."""
    # XLA takes ten times as long to compile `all`, and `max` may lose a NaN on a CPU.
    finite = [ops.isfinite(times(v, factor)) for v in pack(values)]
    counts = [ops.sum(ops.cast(ops.logical_not(f), "float32")) for f in finite]
    return ops.sum(ops.stack(counts)) == 0
