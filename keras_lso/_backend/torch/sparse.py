"""Sparse gradients on PyTorch, such as those of `torch.nn.Embedding(sparse=True)`.

Some of Keras's optimizers for PyTorch fail with them, some after a part of the
variables was updated, and none is faster with them. So all steps take dense gradients.
Rows of equal index are summed first, in float32 or wider. A sum that overflows in the
gradient's own dtype still counts as an overflow, as elsewhere and in `GradScaler`.
"""

import operator

import torch

NARROW = {torch.float16, torch.bfloat16}

_layout_of = operator.attrgetter("layout")


def any_sparse(tensors):
    """Whether one of the tensors is not dense, whatever its layout."""
    try:
        return not set(map(_layout_of, tensors)) <= {torch.strided}
    except AttributeError:  # An array, or a number.
        return any(map(_is_sparse, tensors))


def _is_sparse(tensor):
    return isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided


def prepare_gradients(grads):
    """See `Framework.prepare_gradients`."""
    return list(map(to_dense, grads)) if any_sparse(grads) else grads


def to_dense(grad):
    """See `Framework.to_dense`."""
    return _summed(grad).to_dense() if _is_sparse(grad) else grad


def map_values(fn, grad):
    """See `Framework.map_values`. Sums the rows of a sparse gradient first."""
    if not _is_sparse(grad):
        return fn(grad)
    summed = _summed(grad)
    return _with_values(summed, fn(summed.values()))


def elements_of(grad):
    """See `Framework.elements_of`."""
    return _summed(grad).values() if _is_sparse(grad) else grad


def _summed(grad):
    """Returns a sparse gradient in which each index occurs once."""
    if grad.layout != torch.sparse_coo:
        grad = grad.to_sparse()
    own = grad.coalesce()
    if grad.dtype not in NARROW:
        return own
    sums = grad.float().coalesce().values()
    is_finite = own.values().isfinite()
    return _with_values(own, torch.where(is_finite, sums, own.values().float()))


def _with_values(grad, values):
    return torch.sparse_coo_tensor(
        grad.indices(), values, grad.shape, is_coalesced=True
    )
