"""One read of the gradients, with a proof instead of a check where that is possible.

A finite norm or sum proves that all elements are finite, at a third of the cost of
`isfinite` on a CPU. One that is not finite proves nothing (1e20 squared is inf), nor
does any if unscaling enlarges the gradients. Then every element is checked.
"""

from itertools import repeat

from keras import ops

from keras_lso._backend.framework import Framework, GradientStats, MeasureOptions
from keras_lso._backend.rule import rule_norms
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


class FiniteCheck:
    """How a backend proves that gradients are finite. All tensors are dense."""

    def cond(self, flag, if_true, if_false, *operands):
        """Returns what one of two functions of the operands returns."""

    def norm(self, values):
        """Returns the L2 norm of one tensor."""

    def bound(self, values):
        """Returns a norm that takes least time; no magnitude exceeds it."""
        return self.norm(values)

    def is_proven(self, values):
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
        if options.rules:
            unscaled = [times(v, inv_scale) for v in values]
            norms = rule_norms(framework, options.rules, unscaled, options.leaves)
        if options.clips:
            finite = ops.isfinite(ops.square(norm * options.headroom))
        else:
            factor = inv_scale * options.headroom
            has_headroom = options.headroom > 1
            is_proven = self._are_proven(values, factor, has_headroom, bound, norms)
            finite = self.cond(is_proven, _true, _all_finite, values, factor)
        amax = amax_of(pack(values)) if options.amax else None
        return GradientStats(finite, norms, amax, norm)

    def _are_proven(
        self,
        values: list[Tensor],
        factor: Tensor,
        has_headroom: bool,
        bound: Tensor | None,
        rule_norms: list | None,
    ) -> Tensor:
        """Returns a boolean. True proves that all values times the factor are finite.

        `bound` is the norm of all, if it is computed already.
        """
        are_in_float16 = all(v.dtype == "float16" for v in values)
        if bound is None and has_headroom and not are_in_float16:
            bound = norm_of_all([self.bound(p) for p in _packs_in_float32(values)])
        if bound is not None:
            return bound * factor < PROOF
        # By the values alone: the factor must not enlarge them.
        pairs = list(zip(values, rule_norms or repeat(None), strict=False))
        packs = pack([v for v, norms in pairs if norms is None])
        of_norms = [ops.isfinite(norms[0]) for _, norms in pairs if norms is not None]
        proofs = ops.stack([*map(self.is_proven, packs), *of_norms])
        limit = PROOF_OF_FLOAT16 if are_in_float16 and not rule_norms else 1.0
        return ops.logical_and(ops.all(proofs), factor <= limit)


def _packs_in_float32(values: list[Tensor]) -> list[Tensor]:
    return [in_float32(p) for p in pack(values)]


# At module level, since JAX recompiles a `cond` of new functions outside `jax.jit`.


def _usual(plain, packs):
    return plain


def _joint(plain, packs):
    return joint_norm(packs)


def _true(values, factor):
    return ops.convert_to_tensor(True)


def _all_finite(values, factor):
    # XLA takes ten times as long to compile `all`, and `max` may lose a NaN on a CPU.
    finite = [ops.isfinite(times(v, factor)) for v in pack(values)]
    counts = [ops.sum(ops.cast(ops.logical_not(f), "float32")) for f in finite]
    return ops.sum(ops.stack(counts)) == 0
