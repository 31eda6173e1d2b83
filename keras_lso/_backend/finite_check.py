"""One read of the gradients, with a proof instead of a check where that is possible.

A finite norm or sum proves that all elements are finite, at a third of the cost of
`isfinite` on a CPU. One that is not finite proves nothing (1e20 squared is inf), nor
does any if unscaling enlarges the gradients. Then every element is checked.
"""

from keras import ops

from keras_lso._backend.framework import GradientStats
from keras_lso._backend.rule import rule_norms
from keras_lso._backend.tensors import (
    PROOF,
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
        self,
        framework,
        values,
        amax=False,
        inv_scale=1.0,
        rules=None,
        leaves=None,
        norm=False,
        clips=False,
        headroom=1.0,
    ):
        """See `Framework.measure`. `rules` are those whose norms cost nothing here."""
        inv_scale = ops.convert_to_tensor(inv_scale, dtype="float32")
        factor = inv_scale * headroom
        of_rules, total = [None] * len(values), None
        are_in_float16 = all(v.dtype == "float16" for v in values)
        needs_norm = norm or (headroom > 1 and not are_in_float16)
        if needs_norm or clips:
            packs = list(map(in_float32, pack(values)))
            norm_of = self.norm if norm or clips else self.bound
            plain = norm_of_all(list(map(norm_of, packs)))
        if norm or clips:
            # A norm of the gradient alone is unscaled afterwards: XLA adds up gradients
            # three times as fast as their products.
            total = self.cond(is_usual(plain), _usual, _joint, plain, packs) * inv_scale
        if rules:
            unscaled = [times(v, inv_scale) for v in values]
            of_rules = rule_norms(framework, rules, unscaled, leaves)
        if clips:
            finite = ops.isfinite(ops.square(total * headroom))
        else:
            if needs_norm:
                is_proven = plain * factor < PROOF
            else:
                limit = PROOF_OF_FLOAT16 if are_in_float16 and not rules else 1.0
                proofs = self._proofs(values, of_rules)
                is_proven = ops.logical_and(ops.all(proofs), factor <= limit)
            finite = self.cond(is_proven, _true, _all_finite, values, factor)
        return GradientStats(
            finite,
            rule_norms=of_rules if rules else None,
            amax=amax_of(pack(values)) if amax else None,
            norm=total,
        )

    def _proofs(self, values, of_rules):
        """Returns booleans that prove values to be finite, by norms where there are."""
        pairs = list(zip(values, of_rules, strict=True))
        packs = pack([v for v, norms in pairs if norms is None])
        of_norms = [ops.isfinite(norms[0]) for _, norms in pairs if norms is not None]
        return ops.stack([*map(self.is_proven, packs), *of_norms])


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
