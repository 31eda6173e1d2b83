"""Formulas on lists of tensors: `Tensors`, and functions of them, by `_foreach_*`.

A rule is called with `Tensors` in place of tensors, so that each operation is one call
for a whole chunk. A number or a scalar tensor applies to all items. A tensor with as
many elements as the list has items applies one element to each item. The operations
round like those of Keras's optimizers, which add a multiple in one operation.
"""

from typing import Any

import torch
from torch import Tensor

from keras_lso._backend.tensors import Number
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.measure import operands

# The devices that have PyTorch's fused kernels.
DEVICES = ("cpu", "cuda")


class Tensors:
    """A list of float32 tensors, `factor * items + alpha * addend`, with arithmetic."""

    # The product with a number and the sum of two lists are deferred. So `a + b * 0.5`
    # is one operation on `b`, not two, and `written_over` may write a sum over its
    # first term. It empties the list of the old values.

    __slots__ = ("_addend", "_alpha", "_factor", "_items")

    def __init__(
        self,
        items: list[Tensor],
        factor: Number | None = None,
        addend: list[Tensor] | None = None,
        alpha: Number = 1.0,
    ):
        self._items, self._factor = items, factor
        self._addend, self._alpha = addend, alpha

    @property
    def items(self) -> list[Tensor]:
        """The values."""
        self.compute()
        return self._items

    def compute(self) -> None:
        """Computes a deferred product or sum."""
        items, addend = self._items, self._addend
        if not items or addend == []:
            raise RuntimeError(
                "A formula needs the old value of a variable or slot after `select` "
                "has written the new one over it. Compute the values that need it "
                "before that, each with its own `select`."
            )
        if self._factor is not None:
            # The product is a new list, which nothing else refers to.
            items = torch._foreach_mul(items, operands(self._factor, items))
            if addend is not None:
                torch._foreach_add_(items, addend, alpha=self._alpha)
        elif addend is not None:
            items = torch._foreach_add(items, addend, alpha=self._alpha)
        self._items, self._factor, self._addend = items, None, None

    def is_sum_with(self, old: "Tensors") -> bool:
        """Whether this is a sum that begins with other values, to be computed."""
        is_sum = bool(self._addend) and self._items is old._items
        return is_sum and self._factor is None

    def written_over(
        self, old: "Tensors", found_inf: Tensor | None = None
    ) -> "Tensors":
        """Writes these values over old ones, which nothing may use any more.

        With `found_inf` it takes a sum with the old ones alone.
        """
        # One pass for a sum that begins with the old ones.
        if self._addend and self._items is old._items:
            if self._factor is not None:
                torch._foreach_mul_(self._items, operands(self._factor, self._items))
            add_multiple(self._items, self._addend, self._alpha, found_inf)
        else:
            torch._foreach_copy_(old.items, self.items)
        new = Tensors([*old._items])
        # Also for sums and products that are still to be computed from them.
        old._items.clear()
        return new

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return self._items[0].dtype

    def __add__(self, other: "Tensors | Number") -> "Tensors":
        return self._plus(other, 1.0)

    def __sub__(self, other: "Tensors | Number") -> "Tensors":
        return self._plus(other, -1.0)

    def _plus(self, other: "Tensors | Number", sign: float) -> "Tensors":
        if not isinstance(other, Tensors):
            items = self.items
            return Tensors(torch._foreach_add(items, operands(sign * other, items)))
        if self._addend is not None:
            self.compute()
        if other._addend is not None:
            other.compute()
        alpha = sign if other._factor is None else sign * other._factor
        return Tensors(self._items, self._factor, other._items, alpha)

    def __mul__(self, other: "Tensors | Number") -> "Tensors":
        is_plain = self._factor is None and self._addend is None
        if isinstance(other, float | int) and is_plain:
            return Tensors(self._items, float(other))
        return Tensors(torch._foreach_mul(self.items, self._with(other)))

    def __truediv__(self, other: "Tensors | Number") -> "Tensors":
        return Tensors(torch._foreach_div(self.items, self._with(other)))

    def _with(self, other: "Tensors | Number") -> Any:
        if isinstance(other, Tensors):
            return other.items
        if isinstance(other, torch.Tensor) and other.dim():
            return list(other.unbind())
        return operands(other, self.items)


# --- PyTorch's fused kernel of SGD --------------------------------------------------


def fused_sgd(
    w: list[Tensor],
    d: list[Tensor],
    m: list[Tensor],
    found_inf: Tensor | None,
    lr: Number,
    momentum: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    maximize: bool = False,
    scale: Tensor | None = None,
) -> None:
    """Does `m = momentum * m + (1 - dampening) * d`, `w = w - lr * m`."""
    # With `maximize`, `-d` replaces `d`. With `scale`, a scalar tensor, `d` is divided
    # by it, in place.
    # The first step sets `m = d`, as a momentum of 0 does at every step.
    is_first_step = bool(m) and not momentum
    torch._fused_sgd_(
        w,
        d,
        m,
        lr=lr,
        # The kernel reads a momentum of 0 as "no slot".
        momentum=1.0 if is_first_step else momentum,
        nesterov=nesterov and not is_first_step,
        weight_decay=0.0,
        dampening=dampening,
        maximize=maximize,
        is_first_step=is_first_step,
        grad_scale=scale,
        found_inf=found_inf,
    )


def add_multiple(
    targets: list[Tensor],
    values: list[Tensor],
    alpha: Number,
    found_inf: Tensor | None = None,
) -> None:
    """Does `w = w + alpha * d`; the fused kernel of the host rounds alike."""
    if found_inf is not None or torch_measure.is_on_host(targets[0]):
        fused_sgd(targets, values, [], found_inf, lr=-alpha)
    else:
        torch._foreach_add_(targets, values, alpha=alpha)


def can_copy_unless(target: Tensor) -> bool:
    """Whether `copy_unless` takes this tensor, or shard: not under `torch.compile`."""
    return (
        target.is_floating_point()
        and target.is_contiguous()
        and target.device.type in DEVICES
        and not torch_measure.THREAD.is_traced
    )


def copy_unless(
    found_inf: Tensor, targets: list[Tensor], sources: list[Tensor]
) -> None:
    """Copies contiguous tensors of a dtype, or nothing where `found_inf` is 1.0."""
    # The targets serve as the momenta of the fused SGD kernel, which sets them to the
    # gradients. The sources serve as its gradients, and also as its variables, which a
    # rate of 0 leaves as they are.
    fused_sgd(sources, sources, targets, found_inf, lr=0.0, momentum=0.0)
    # The kernel does not increment the version. Autograd relies on it, and so do the
    # masters of the same variables in another optimizer.
    torch.autograd.graph.increment_version(targets)
