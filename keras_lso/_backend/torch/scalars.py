"""The scalars of a step on PyTorch, in few operations, on tensors only.

A function of `keras.ops` first inspects its arguments, which takes three times as long
as the operation. On a GPU each operation is a kernel that the host has to launch.
"""

import functools

import keras
import numpy as np
import torch
from keras import ops

from keras_lso._backend.scalars import Scalars
from keras_lso._backend.tensors import FLOAT32_MAX
from keras_lso._backend.torch import measure as torch_measure


@functools.cache
def _named(dtype):
    """Returns the PyTorch dtype, given the dtype or its name."""
    return getattr(torch, keras.backend.standardize_dtype(dtype))


def scalar(value, dtype):
    """See `Framework.scalar`. Avoids a copy to the device, for which PyTorch waits."""
    if isinstance(value, torch.Tensor):
        return value.to(_named(dtype))
    if isinstance(value, int | float):
        return ops.zeros((), dtype=dtype).fill_(value)
    return ops.convert_to_tensor(value, dtype=dtype)


def value_if_on_host(tensor):
    """See `Framework.value_if_on_host`."""
    reads = torch_measure.is_on_host(tensor) and not torch.compiler.is_compiling()
    return tensor.item() if reads else None


class TorchScalars(Scalars):
    """See `Scalars`."""

    where = staticmethod(torch.where)
    clip = staticmethod(torch.clamp)
    maximum = staticmethod(torch.maximum)
    reciprocal = staticmethod(torch.reciprocal)
    sqrt = staticmethod(torch.sqrt)
    zeros_like = staticmethod(torch.zeros_like)
    ones_like = staticmethod(torch.ones_like)
    logical_and = staticmethod(torch.logical_and)
    logical_not = staticmethod(torch.logical_not)
    logical_or = staticmethod(torch.logical_or)

    @staticmethod
    def cast(tensor, dtype):
        return tensor.to(_named(dtype))

    @staticmethod
    def copy(tensor):
        return tensor.clone()

    def move_scale(
        self, scale, good_steps, finite, drops, growth, backoff, period, bounds
    ):
        """See `Scalars.move_scale`. Uses the kernel of `GradScaler` where it can."""
        if drops is None and _only_counts(scale, good_steps, finite, period, bounds):
            good_steps.add_(1)
            return
        overflows = torch.logical_not(finite)
        numbers = isinstance(backoff, float) and isinstance(period, int)
        # The kernel does not grow a scale beyond float32.
        if drops is None and numbers and bounds[1] * growth <= FLOAT32_MAX:
            # It grows the scale if the count equals the period, not if it exceeds it.
            good_steps.clamp_(max=period - 1)
            # It multiplies in float64, where the product of two float32 is exact.
            growth, backoff = float(np.float32(growth)), float(np.float32(backoff))
            found_inf = overflows.float()
            torch._amp_update_scale_(
                scale, good_steps, found_inf, growth, backoff, period
            )
        else:
            good_steps.add_(1)
            grows = torch.logical_and(finite, good_steps >= period)
            drops = overflows if drops is None else drops
            dropped = torch.where(drops, scale * backoff, scale)
            scale.copy_(torch.where(grows, scale * growth, dropped))
            good_steps.mul_(torch.logical_and(finite, torch.logical_not(grows)))
        scale.clamp_(*bounds)

    def count_step(
        self,
        skipped,
        applied,
        streaks,
        finite,
        rates_finite,
        scales,
        update_scale,
        assign,
    ):
        """See `Scalars.count_step`. Works in place, without `assign`."""
        takes = finite if rates_finite is None else finite & rates_finite
        if applied is not None:
            applied.add_(takes)
        if torch_measure.is_on_host(takes) and takes:
            if not any(streaks.tolist()):
                return finite
            all_finite = streaks[2] == 0
            (streaks if update_scale else streaks[:2]).zero_()
            return all_finite
        missed, overflows = torch.logical_not(takes), torch.logical_not(finite)
        skipped.add_(missed)
        streaks.add_(torch.stack([missed, overflows, overflows]))
        all_finite = streaks[2] == 0
        scale, lowest = scales
        is_left = torch.ones_like(missed)
        if update_scale:
            is_left = missed & finite
        streaks.mul_(torch.stack([missed, overflows & (scale <= lowest), is_left]))
        return all_finite

    def append_row(self, ring, count, row, assign):
        """See `Scalars.append_row`. Works in place, without `assign`."""
        place = torch.remainder(count, ring.shape[0]).long()
        row = torch.stack(
            [
                value.float() if torch.is_tensor(value) else ring.new_full((), value)
                for value in row
            ]
        )
        ring.index_copy_(0, place[None], row[None])
        count.add_(1)


def _only_counts(scale, good_steps, finite, period, bounds):
    """Whether the host knows that the loss scale stays as it is in this step."""
    return (
        torch_measure.is_on_host(finite)
        and not torch.compiler.is_compiling()
        and bool(finite)
        and isinstance(period, int)
        and good_steps.item() + 1 < period
        and bounds[0] <= scale.item() <= bounds[1]
    )
