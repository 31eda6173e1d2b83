"""A rule: one step of an optimizer as a formula, which every backend runs.

A rule holds the coefficients of one step as scalars. It is called with plain tensors,

    rule(xp, select, gradient, variable, *slots, norms=norms)

and returns the new values of the variable and of its slots. The gradient is unscaled
already.

`xp` has the functions of the formula: it is `formulas.py`, or what a backend has in its
place. On PyTorch the tensors are `Tensors`, lists of tensors that are updated together.

`select(new, old)` is `new` where the step is applied and `old` where it is skipped. It
is applied to every new value as soon as there is one. Later values then never need
the old value as well, so that a compiler can update in place.

Some rules take norms of whole tensors, those of what `measured(xp, gradient, variable,
*slots)` returns, in that order: see `Framework.norms_of`.

The rules of Keras's optimizers are in `_keras_internals/rules.py`, those of LARS, LAMB
and NovoGrad with their classes in `optimizers/`.
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from keras import ops

from keras_lso._backend.scalars import Scalars
from keras_lso._backend.types import Tensor

_SCALARS = Scalars()


class Norms(enum.Enum):
    """Which norms of whole tensors the rules of a class take."""

    NONE = enum.auto()
    GRADIENT = enum.auto()
    """That of the gradient alone."""
    OFTEN_GRADIENT = enum.auto()
    """Those of a direction, which for some coefficients is the gradient, and of the
    variable."""
    DIRECTION = enum.auto()
    """Those of a direction that depends on the slots, and of the variable."""


class Rule:
    """What is true of a rule unless it says otherwise.

    Attributes:
        slots: Dict of the names of its slots to the attributes of the optimizer that
            hold them, lists with an item for each variable.
        norms: A `Norms`.
        kernel: String, the name by which backends have a faster kernel for it. Defaults
            to `None`: they run the formula.
        finish: Method `(self, optimizer, finite)`, which moves what the optimizer keeps
            in addition to slots after a step by such rules, if `finite`, a boolean
            scalar tensor, says that it was applied. Defaults to `None`: nothing.
    """

    slots: ClassVar[dict[str, str]] = {}
    norms: ClassVar[Norms] = Norms.NONE
    kernel: ClassVar[str | None] = None
    finish: ClassVar[Callable[..., None] | None] = None

    @property
    def takes_norms(self) -> bool:
        """Whether this rule takes norms, which may depend on its coefficients."""
        return self.norms is not Norms.NONE

    @classmethod
    def is_rule_of(cls, optimizer: Any) -> bool:
        """Whether an optimizer of a class that has this rule steps by it now."""
        return True

    @classmethod
    def of_groups(cls, optimizer: Any, learning_rate: Tensor) -> dict[Any, Any]:
        """Returns the rules of this step, a dict by the group of a variable.

        Args:
            optimizer: The optimizer.
            learning_rate: Scalar tensor, in float32 or wider.
        """
        raise NotImplementedError

    @classmethod
    def groups_of(cls, optimizer: Any, indices: Sequence[int]) -> list[Any]:
        """Returns the group of each variable, a list of keys of that dict.

        Args:
            optimizer: The optimizer. Our own know the groups of their variables.
            indices: List of ints, which of the variables that it was built for.
        """
        return optimizer._groups_of(indices)


def always(new: Tensor, old: Tensor) -> Tensor:
    """The `select` of a step that is applied."""
    return new


# --- Trust ratios -------------------------------------------------------------------


@dataclass(frozen=True)
class TrustRatio:
    """How far a layer may move, relative to its norm.

    ```python
    ratio = eeta * |w| / (|d| + epsilon)                        # paper=False
    ratio = eeta * |w| / (|d| + weight_decay * |w| + epsilon)   # paper=True
    ratio = min(max(ratio, lower), upper)
    ratio = 1 where |w| or |d| is 0
    ```
    """

    eeta: float = 1.0
    epsilon: float = 0.0
    lower: float = 0.0
    upper: float = math.inf
    paper: bool = False

    def fraction(
        self, d_norm: Tensor, w_norm: Tensor, weight_decay: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the numerator and the denominator of the ratio without its limits.

        Both may be 0. A NaN ends a program under JAX's `jax_debug_nans`, also where a
        `where` leaves it out afterwards.
        """
        denominator = d_norm + self.epsilon
        if self.paper:
            denominator = denominator + weight_decay * w_norm
        return self.eeta * w_norm, denominator

    def __call__(
        self,
        d_norm: Tensor,
        w_norm: Tensor,
        weight_decay: float,
        scalars: Any = _SCALARS,
    ) -> Tensor:
        """Returns the ratio; `scalars` are the `Scalars` to compute it by."""
        numerator, denominator = self.fraction(d_norm, w_norm, weight_decay)
        one, usable = scalars.ones_like(numerator), (w_norm > 0) & (d_norm > 0)
        ratio = scalars.where(usable, numerator, one) / denominator
        # Not finite: of a variable so large that its norm overflows.
        usable = usable & (ratio < math.inf)
        if self.lower > 0:
            ratio = ops.maximum(ratio, self.lower)
        if self.upper < math.inf:
            ratio = ops.minimum(ratio, self.upper)
        return scalars.where(usable, ratio, one)


class LayerAdaptiveRule(Rule):
    """A rule whose steps a trust ratio rescales, layer by layer, if it has one."""

    learning_rate: Any
    weight_decay: float
    trust_ratio: TrustRatio | None

    @property
    def takes_norms(self) -> bool:
        return self.trust_ratio is not None

    def rate(self, norms: Any, scalars: Any = _SCALARS) -> Tensor:
        """Returns the learning rate of a layer with these norms; see `TrustRatio`."""
        if self.trust_ratio is None:
            return self.learning_rate
        d_norm, w_norm = norms
        ratio = self.trust_ratio(d_norm, w_norm, self.weight_decay, scalars)
        return self.learning_rate * ratio
