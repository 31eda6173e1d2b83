"""A rule: one step of an optimizer as a formula, which every backend runs.

A rule holds the coefficients of one step as scalars. It is called with plain tensors,

    rule(xp, select, gradient, variable, *slots, norms=norms)

and returns the new values of the variable and of its slots. The gradient is already
unscaled.

`xp` is the module of the functions that the formula calls: `_backend/xp.py`, or a
backend's own. On PyTorch the tensors are `Tensors`, lists of tensors that are updated
together.

`select(new, old)` is `new` where the step is applied and `old` where it is skipped. The
rule calls it on each new value immediately, and does not use the old value after that,
so that a compiler or PyTorch can update in place.

Some rules take L2 norms of whole tensors: `norms(*tensors)` returns them as a tuple. A
backend may have them from its read of the gradients, of the tensors that
`measured(xp, gradient, variable, *slots)` returns, in that order.

The rules of Keras's optimizers are in `_keras_internals/rules.py`. The rules of LARS,
LAMB and NovoGrad are with their classes in `optimizers/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from keras import ops

from keras_lso._backend.tensors import FLOAT32_MAX, Tensor, in_float32

if TYPE_CHECKING:
    from keras_lso._backend.framework import Framework
    from keras_lso._backend.leaves import Leaves

# The norms that the rule of each gradient takes, or None for a rule without norms.
RuleNorms: TypeAlias = list[tuple[Tensor, ...] | None]


class Rule:
    """The base class of rules, with the defaults of their attributes."""

    # The attributes of the optimizer that hold the slots, by the slots' names.
    slots: ClassVar[dict[str, str]] = {}
    # Whether rules of the class may take norms.
    has_norms: ClassVar[bool] = False
    # Whether a step mixes the elements of matrices, besides by `norms`: it takes no
    # parts of them, nor the elements as a vector.
    mixes_matrices: ClassVar[bool] = False
    # The names of slots that are a number for each variable.
    scalars: ClassVar[tuple[str, ...]] = ()
    # Whether the other slots may be rounded to fewer bits: not if they are sums, which
    # never forget their rounding errors.
    has_moments: ClassVar[bool] = True
    # Whether a step squares the elements of gradients: then a gradient whose square
    # is infinite skips the step. A subclass declares it again.
    squares: ClassVar[bool] = True
    # PyTorch's own kernel for the formula: `"sgd"`, `"momentum"` or `"adam"`. Or for
    # its end: `"descent"`, with momentum, along what the method `descent` returns.
    kernel: ClassVar[str | None] = None
    # Method `(self, optimizer, finite)` of one of the rules of a step, for after it:
    # updates other state than slots if it was applied, as the boolean tensor `finite`
    # says.
    finish: ClassVar[Callable[..., None] | None] = None
    # The formula, and the tensors whose norms it takes: see the top of this file.
    __call__: ClassVar[Callable[..., tuple[Tensor, ...]]]
    measured: ClassVar[Callable[..., tuple[Tensor, ...]]]

    @property
    def takes_norms(self) -> bool:
        """Whether this rule takes norms, which may depend on its coefficients."""
        return self.has_norms

    @classmethod
    def is_rule_of(cls, optimizer: Any) -> bool:
        """Whether an optimizer of a class with this rule currently steps by it."""
        return True

    @classmethod
    def of_groups(cls, optimizer: Any, learning_rate: Tensor) -> dict[Any, Any]:
        """Returns the rules of this step, a dict from groups of variables to rules.

        One may be of another class, with another formula and kernel, for variables that
        have only the first of the slots. What else this class declares holds for all:
        an update asks it, or the first rule.
        """
        # The learning rate is a scalar tensor, in float32 or wider.
        raise NotImplementedError

    @classmethod
    def groups_of(cls, optimizer: Any, indices: Sequence[int]) -> list[Any]:
        """Returns the group, a key of `of_groups`, of the variables at `indices`."""
        return optimizer._groups_of(indices)


def always(new: Tensor, old: Tensor) -> Tensor:
    """The `select` of a step that is applied."""
    return new


def given(norms: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns the `norms` of a rule whose norms are known."""
    return lambda *tensors: norms


def rule_norms(
    framework: Framework, rules: list[Rule], unscaled: list[Tensor], leaves: Leaves
) -> RuleNorms:
    """Returns `GradientStats.rule_norms` of unscaled gradients."""
    triples = zip(rules, unscaled, leaves.states, strict=True)
    return [norms_of(framework, rule, g, *state) for rule, g, state in triples]


def norms_of(framework: Framework, rule: Rule, gradient: Tensor, *state: Tensor) -> Any:
    """Returns the L2 norms that a rule takes, a tuple; None if it takes none."""
    # The gradient is unscaled; `state` is the variable and its slots.
    if not rule.takes_norms:
        return None
    measured = rule.measured(framework.xp, gradient, *map(in_float32, state))
    return framework.norms(*measured)


# --- Trust ratios -------------------------------------------------------------------


@dataclass(frozen=True)
class TrustRatio:
    """The distance that a layer may move, relative to its norm.

    ```python
    ratio = eeta * |w| / (|d| + epsilon)                        # paper=False
    ratio = eeta * |w| / (|d| + weight_decay * |w| + epsilon)   # paper=True
    ratio = min(max(ratio, lower), upper)
    ratio = 1 where |w| or |d| is 0
    ```

    `d` is the direction of the step, with its decay; with `paper=True` the gradient.
    """

    eeta: float = 1.0
    epsilon: float = 0.0
    lower: float = 0.0
    upper: float = math.inf
    paper: bool = False

    def fraction(
        self, d_norm: Tensor, w_norm: Tensor, weight_decay: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the numerator and the denominator of the ratio without its limits."""
        # Both may be 0. Under JAX's `jax_debug_nans` their quotient, a NaN, ends the
        # program, even if a later `where` discards it.
        denominator = d_norm + self.epsilon
        if self.paper:
            denominator = denominator + weight_decay * w_norm
        return self.eeta * w_norm, denominator

    def __call__(self, d_norm: Tensor, w_norm: Tensor, weight_decay: float) -> Tensor:
        """Returns the ratio of a layer with these norms."""
        numerator, denominator = self.fraction(d_norm, w_norm, weight_decay)
        ones, usable = ops.ones_like(numerator), (w_norm > 0) & (d_norm > 0)
        ratio = numerator / ops.where(usable, denominator, ones)
        # The ratio is not finite if the norm of a large variable overflows.
        usable = usable & (ratio <= FLOAT32_MAX)
        if self.lower > 0 or self.upper < math.inf:
            # Keras would convert numbers to `floatx`, and copy them to a device.
            ratio = ops.maximum(ratio, ones * self.lower)
            ratio = ops.minimum(ratio, ones * self.upper)
        return ops.where(usable, ratio, ones)


class LayerAdaptiveRule(Rule):
    """A rule whose steps a trust ratio rescales, layer by layer, if it has one."""

    has_norms = True
    learning_rate: Any
    weight_decay: float
    trust_ratio: TrustRatio | None

    @property
    def takes_norms(self) -> bool:
        return self.trust_ratio is not None

    def rate(self, norms: Any, d: Tensor, w: Tensor) -> Tensor:
        """Returns the learning rate of a layer; see `TrustRatio`."""
        if self.trust_ratio is None:
            return self.learning_rate
        d_norm, w_norm = norms(d, w)
        return self.learning_rate * self.trust_ratio(d_norm, w_norm, self.weight_decay)
