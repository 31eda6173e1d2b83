"""Kernels for the masters of low-precision variables, on PyTorch.

They implement the formulas `Framework.resynchronised` and `Framework.rounded`, and are
tested against these. `pairs` is a list of tuples of tensors, a master and its variable,
the variables of one dtype. `finite` is a boolean scalar tensor: where it is False
nothing changes. On the host it is None, since a skipped step calls nothing here.
"""

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso._backend.tensors import FLOAT16_MAX
from keras_lso._backend.torch import in_step as torch_in_step
from keras_lso._backend.torch.kernels import copy_unless


def resynchronise(framework, pairs, finite, memory):
    """Re-initialises the masters of variables that were assigned externally."""
    if finite is not None:
        if not torch_in_step.are_known(pairs):
            _resynchronise_where(framework, finite, pairs)
        return
    masters, variables = map(list, zip(*pairs, strict=True))
    expected = memory.like(variables)
    torch._foreach_copy_(expected, masters)
    for master, variable, value in zip(masters, variables, expected, strict=True):
        # In the rare case of -0.0, or of a master beyond float16's range, that differs
        # from the rounded master, and the formula changes nothing.
        if not _are_alike(value, variable):
            master.copy_(framework.resynchronised(master, variable))


def _are_alike(values, others):
    """Whether two tensors have the same elements.

    `torch.equal` takes ten times as long for float16 as for int64 views of four each.
    """
    pair = values.reshape(-1), others.reshape(-1)
    if all(
        t.numel() and t.numel() % 4 == t.storage_offset() % 4 == 0 and t.is_contiguous()
        for t in pair
    ):
        pair = tuple(t.view(torch.int64) for t in pair)
    return torch.equal(*pair)


def _resynchronise_where(framework, finite, pairs):
    # `Framework.resynchronised` in fewer passes: no float32 copy of the variables.
    masters, variables = map(list, zip(*pairs, strict=True))
    old, value = map(_flatten_dense_tensors, (masters, variables))
    moved = (framework.rounded(old, value.dtype) != value).logical_and_(finite)
    new = torch.where(moved, value, old)
    torch._foreach_copy_(masters, _unflatten_dense_tensors(new, masters))


def round_into_variables(pairs, finite, found_inf):
    """Rounds the masters into the variables.

    `found_inf` is a float32 scalar tensor, 1.0 where `finite` is False; None on the
    host.
    """
    masters, variables = map(list, zip(*pairs, strict=True))
    if finite is not None:
        _round_where(finite, found_inf, masters, variables)
        torch_in_step.note(pairs, finite)
        return
    torch._foreach_copy_(variables, masters)
    if variables[0].dtype == torch.float16:
        for variable in variables:
            variable.clamp_(-FLOAT16_MAX, FLOAT16_MAX)


def _round_where(finite, found_inf, masters, variables):
    # In one buffer, which one kernel clamps.
    flat = variables[0].new_empty(sum(v.numel() for v in variables))
    new = _unflatten_dense_tensors(flat, variables)
    torch._foreach_copy_(new, masters)
    if flat.dtype == torch.float16:
        flat.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
    if all(v.is_contiguous() for v in variables):
        copy_unless(found_inf, variables, new)
    else:
        kept = torch.where(finite, flat, _flatten_dense_tensors(variables))
        torch._foreach_copy_(variables, _unflatten_dense_tensors(kept, variables))
