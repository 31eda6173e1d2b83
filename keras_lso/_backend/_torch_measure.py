"""Reading the gradients once, on PyTorch."""

import math
import operator

import torch
from torch._utils import _flatten_dense_tensors

from keras_lso._backend.measurement import Measurement
from keras_lso._backend.tensors import amax_of, in_float32

# Elements. The cost of an operation on a smaller tensor is that of its call.
SMALL = 2**14

_dtype_of = operator.attrgetter("dtype")


def is_on_host(tensor):
    """Whether the host reads this tensor without synchronising."""
    return tensor.device.type == "cpu"


def measure(grads, amax=False, inv_scale=1.0, rules=None, packs=None, norm=False):
    """See `Framework.measure`; the tensors are plain.

    On the host a finite L2 norm proves finite elements, at a tenth of the cost of
    `isfinite`. A norm that is not finite proves nothing (1e20 squared is inf), nor does
    any if unscaling enlarges the gradients: then every element is checked. On an
    accelerator that branch would synchronise. There the largest magnitude decides,
    which is exact.

    Only norms of the gradients are returned: the step computes others when it has the
    tensors in the cache.
    """
    if norm:
        return _by_the_norm(grads, amax, inv_scale, packs or Packs(grads))
    if not is_on_host(grads[0]):
        finite, largest = _check_on_accelerator(grads, inv_scale)
        return Measurement(finite, amax=largest if amax else None)
    packs = None if rules and rules[0].uses_gradient_norms else packs or Packs(grads)
    finite, norms = _check_on_host(grads, inv_scale, packs)
    return Measurement(finite, norms, amax=_amax_on_host(grads) if amax else None)


def _by_the_norm(grads, amax, inv_scale, packs):
    """Returns the `Measurement` where the norm of all gradients must be finite."""
    norms = norms_of(packs.of(grads), packs.wide_dtype)
    total = (torch.linalg.vector_norm(norms) * inv_scale).float()
    largest = None
    if amax:
        on_host = is_on_host(grads[0])
        largest = _amax_on_host(grads) if on_host else _largest(grads).float()
    return Measurement(total.square() < torch.inf, amax=largest, norm=total)


def _check_on_host(values, inv_scale, packs):
    """Returns whether all are finite, and the unscaled norms unless they are packed."""
    # What is below inf is no NaN either; to ask so takes a third of `isfinite`.
    if packs is None:
        norms = norms_of(values)
        finite = (norms < torch.inf).all()
    else:
        proofs = torch._foreach_norm(packs.of(values), 2, dtype=packs.wide_dtype)
        norm = proofs[0] if len(proofs) == 1 else torch.stack(proofs).max()
        finite = norm < torch.inf
    if finite and inv_scale <= 1:
        return finite, None if packs else list((norms * inv_scale).unbind())
    return _all_finite(values, inv_scale), None


class Packs:
    """Which tensors are so small that one norm of all takes less than one of each.

    Args:
        tensors: List of plain tensors, of which nothing is kept but where they are.

    Attributes:
        wide_dtype: What `wide_dtype` returns of these tensors.
    """

    def __init__(self, tensors):
        small = [i for i, t in enumerate(tensors) if t.numel() <= SMALL]
        dtypes = {tensors[i].dtype for i in small}
        # A subclass may be sharded, and then cannot be concatenated with others.
        is_plain = set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
        self.wide_dtype = wide_dtype(tensors)
        self._small = small if is_plain and len(dtypes) == 1 else []
        self._are_all = len(self._small) == len(tensors)
        self._rest = sorted(set(range(len(tensors))) - set(self._small))
        self._are_flat = all(tensors[i].dim() == 1 for i in self._small)

    def of(self, tensors):
        """Returns the tensors, the small ones concatenated."""
        if not self._small:
            return tensors
        small = tensors if self._are_all else [tensors[i] for i in self._small]
        # Without a view of each, which takes longer than to copy it.
        pack = torch.cat(small) if self._are_flat else _flatten_dense_tensors(small)
        return [pack, *map(tensors.__getitem__, self._rest)]


def _check_on_accelerator(values, inv_scale):
    """Returns whether all are finite, and the largest magnitude.

    No norms: those of very large gradients can be inf where those of the unscaled
    gradients, which the step takes, are finite.
    """
    amax = _largest(values)
    return (amax * inv_scale).isfinite(), amax.float()


def _largest(values):
    # An empty tensor has no maximum.
    amax = values[0].new_zeros((), dtype=wide_dtype(values))
    values = [v for v in values if v.numel()]
    if values:
        norms = torch._foreach_norm(values, math.inf, dtype=amax.dtype)
        amax = torch.stack(norms).max()
    return amax


def _amax_on_host(values):
    """Returns the largest magnitude, without the copy that `abs` makes."""
    values = [v for v in values if v.numel()]
    if not values:
        return amax_of(values)
    ends = [end.float() for v in values for end in (v.max(), -v.min())]
    return torch.stack(ends).max()


def _all_finite(values, inv_scale):
    values = [in_float32(v) for v in values]
    return torch.stack([(v * inv_scale).isfinite().all() for v in values]).all()


_ROW = 1024


def norms_of(values, dtype=None):
    """Returns the L2 norms as one tensor, by default in their `wide_dtype`.

    By rows on a CPU, where PyTorch adds squares one by one: of two million elements
    four digits would be left.
    """
    dtype = dtype or wide_dtype(values)
    if values[0].is_cpu and max(map(torch.Tensor.numel, values)) > 4 * _ROW:
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
    """Returns a dtype for norms of these tensors, narrower than none of theirs."""
    return torch.float64 if torch.float64 in map(_dtype_of, values) else torch.float32
