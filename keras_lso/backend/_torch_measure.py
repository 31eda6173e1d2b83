"""Reading the gradients once, on PyTorch."""

import math

import torch
from torch._utils import _flatten_dense_tensors

from keras_lso.backend import generic
from keras_lso.backend.generic import Measurement

# Elements. To PyTorch a smaller tensor is mostly the work of calling something with it.
SMALL = 2**14


def is_on_host(tensor):
    """Whether to look at a tensor beside this one costs nothing."""
    return tensor.device.type == "cpu"


@torch.no_grad()
def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None, are_alike=False):
    """See `generic.measure`.

    On the host a finite L2 norm proves finite elements, and one multi-tensor norm costs
    a tenth of `isfinite` over all tensors. A norm that is not finite proves nothing
    (1e20 squared is inf), nor does any if unscaling makes the gradients larger: only
    then every element is looked at. On an accelerator nobody may look at that norm.
    There the largest magnitude decides, which is exact.

    The norms of what no rule changes before it takes the norm serve the step as
    well. It measures the others itself, where it has them in the cache.
    """
    if not is_on_host(grads[0]):
        finite, top = _check_on_accelerator(grads, inv_scale)
        return Measurement(finite, None, top if amax else None)
    has_norms = bool(rules) and rules[0].has_norms
    finite, norms = _check_on_host(grads, inv_scale, has_norms)
    return Measurement(finite, norms, _largest(grads) if amax else None)


def _check_on_host(values, inv_scale, wants_norms):
    """Returns whether all are finite, and the unscaled norms if they are at hand."""
    if wants_norms:
        norms = norms_of(values)
    else:
        # As a proof any norm will do.
        proofs = _together(values)
        norms = torch.stack(torch._foreach_norm(proofs, 2, dtype=wide_dtype(proofs)))
    finite = norms.isfinite().all()
    if finite & (inv_scale <= 1):
        return finite, list((norms * inv_scale).unbind()) if wants_norms else None
    return _all_finite(values, inv_scale), None


def _together(values):
    """Returns the same elements as fewer tensors.

    Of small ones a copy as one takes a third of the time of a norm for each.
    """
    small: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for v in values:
        # A subclass may be sharded, and then cannot be put together with others.
        is_small = type(v) is torch.Tensor and v.numel() <= SMALL
        (small if is_small else rest).append(v)
    if len({v.dtype for v in small}) != 1:
        return values
    return [_flatten_dense_tensors(small), *rest]


def _check_on_accelerator(values, inv_scale):
    """Returns whether all are finite, and the largest magnitude.

    Not the norms: they are as the step wants them only if it gets those of the unscaled
    gradients, which for very large ones are finite where these are not.
    """
    # Of nothing there is no largest magnitude. An inf or a NaN stays one.
    top = values[0].new_zeros((), dtype=wide_dtype(values))
    values = [v for v in values if v.numel()]
    if values:
        top = torch.stack(torch._foreach_norm(values, math.inf, dtype=top.dtype)).max()
    finite = (top * inv_scale).isfinite()
    return finite, top.float()


def _largest(values):
    """Returns the largest magnitude; `abs` would write a copy of every tensor."""
    values = [v for v in values if v.numel()]
    if not values:
        return generic.largest_magnitude(values)
    ends = [end.float() for v in values for end in (v.max(), -v.min())]
    return torch.stack(ends).max()


def _all_finite(values, inv_scale):
    values = [generic.in_float32(v) for v in values]
    return torch.stack([(v * inv_scale).isfinite().all() for v in values]).all()


@torch.no_grad()
def l2_norms(tensors):
    """See `generic.l2_norms`."""
    return list(norms_of(tensors).unbind())


_ROW = 1024


def norms_of(values):
    """Returns the L2 norms as one tensor.

    By rows on a CPU: PyTorch adds up one square after the other there, and of two
    million elements four digits would be left.
    """
    dtype = wide_dtype(values)
    if values[0].is_cpu:
        values = [_row_norms(v, dtype) if v.numel() > 4 * _ROW else v for v in values]
    return torch.stack(torch._foreach_norm(values, 2, dtype=dtype))


def _row_norms(values, dtype):
    flat = values.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    if whole == flat.numel():
        return rows
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.cat([rows, rest.view(1)])


def wide_dtype(values):
    """Returns the dtype that norms of these tensors are summed up in."""
    # A norm may accumulate in a wider type than its tensor's, never a narrower one.
    is_double = any(v.dtype == torch.float64 for v in values)
    return torch.float64 if is_double else torch.float32
