"""Float32 masters of float16 variables, on PyTorch.

See `generic.fused_step`. `pairs` are tuples of a master and its variable, tensors, the
variables of one dtype, or none at all. `finite` is None on the host, where nobody comes
here after an overflow; on an accelerator it is a boolean scalar tensor, and where it is
False nothing changes.
"""

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from keras_lso.backend.masters import FLOAT16_MAX, restarted, rounded


def restart(pairs, finite, memory):
    """Lets the masters of variables that were assigned from outside restart there."""
    if not pairs:
        return
    if finite is not None:
        _assign_where(finite, restarted, pairs)
        return
    masters, variables = map(list, zip(*pairs, strict=True))
    expected = memory.like(variables)
    torch._foreach_copy_(expected, masters)
    for master, variable, value in zip(masters, variables, expected, strict=True):
        # What is too large for float16 does not look alike, nor does -0.0; that is
        # seldom, and not wrong.
        if not _are_alike(value, variable):
            master.copy_(restarted(master, variable))


def _are_alike(values, others):
    """Whether they have the same elements.

    `torch.equal` takes ten times as long for float16 as for integers that hold four of
    its numbers each.
    """
    pair = values.reshape(-1), others.reshape(-1)
    if all(t.numel() and t.numel() % 4 == t.storage_offset() % 4 == 0 for t in pair):
        pair = tuple(t.view(torch.int64) for t in pair)
    return torch.equal(*pair)


def round_into_variables(pairs, finite):
    """Rounds the masters into the variables."""
    if not pairs:
        return
    if finite is not None:
        pairs = [(variable, master) for master, variable in pairs]
        _assign_where(finite, lambda v, master: rounded(master, v.dtype), pairs)
        return
    masters, variables = map(list, zip(*pairs, strict=True))
    torch._foreach_copy_(variables, masters)
    if variables[0].dtype == torch.float16:
        for variable in variables:
            variable.clamp_(-FLOAT16_MAX, FLOAT16_MAX)


def _assign_where(finite, function, pairs):
    """Does `x = where(finite, function(x, y), x)` for all pairs at once."""
    targets, sources = map(list, zip(*pairs, strict=True))
    old, other = map(_flatten_dense_tensors, (targets, sources))
    new = torch.where(finite, function(old, other), old)
    torch._foreach_copy_(targets, _unflatten_dense_tensors(new, targets))
