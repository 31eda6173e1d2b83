"""Gradients on PyTorch, plain, sharded or sparse, and the one read of them: `measure`.

Some of Keras's optimizers for PyTorch fail with sparse gradients, such as those of
`torch.nn.Embedding(sparse=True)`, some after a part of the variables was updated, and
none is faster with them. So all steps take dense gradients. Rows of equal index are
summed first, in float32 or wider. A sum that overflows in the gradient's own dtype
still counts as an overflow, as elsewhere and in `GradScaler`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from keras_lso._backend import xp
from keras_lso._backend.framework import (
    CHECK_ONLY,
    Framework,
    GradientStats,
    MeasureOptions,
)
from keras_lso._backend.leaves import Leaves
from keras_lso._backend.rule import Rule, RuleNorms
from keras_lso._backend.tensors import PROOF, USUAL_NORMS, Grads, Number, is_one
from keras_lso._backend.torch import layouts
from keras_lso._backend.torch.shards import Reductions, any_sharded, shards_of

# In elements. The cost of an operation on a smaller tensor is the cost of its call.
SMALL = 2**14
# Tensors of other classes may hold shards, rows or a mask.
TENSOR_TYPES = {torch.Tensor, torch.nn.Parameter}
_NARROW = {torch.float16, torch.bfloat16}
FLOATS = {*_NARROW, torch.float32, torch.float64}

# For `map`: before Python 3.12 a comprehension is a call of a function, 0.1 us, and a
# step would have ten of them.
dtype_of = operator.attrgetter("dtype")
_layout_of = operator.attrgetter("layout")


class _Thread(threading.local):
    """What this thread runs a step for."""

    # A graph of `torch.compile`: `graphs.py`.
    is_traced = False
    # A CUDA graph of the package: `captured.py`.
    is_captured = False


THREAD = _Thread()


@contextlib.contextmanager
def _marked(mark: str) -> Iterator[None]:
    """Sets a mark of this thread for the time of a step."""
    setattr(THREAD, mark, True)
    try:
        yield
    finally:
        setattr(THREAD, mark, False)


# The step takes the reference of each primitive.
tracing = functools.partial(_marked, "is_traced")
# The step relies on what is compared before each replay.
capturing = functools.partial(_marked, "is_captured")


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host can read this tensor without synchronising."""
    return tensor.device.type == "cpu" and not THREAD.is_traced


def found_inf_of(flag: Tensor) -> Tensor:
    """Returns 1.0 where a boolean scalar tensor is False, else 0.0, by one kernel."""
    return torch.logical_not(flag, out=flag.new_empty((), dtype=torch.float32))


def operands(number: Number, tensors: list[Tensor]) -> Number | list[Tensor]:
    """Returns a number or scalar tensor in the form that is fastest in `_foreach_*`."""
    # On the host it is a list of the same tensor for all `tensors`: from a number the
    # operation would make one for each item, which takes twice as long as the product.
    if not is_on_host(tensors[0]):
        return number
    if not isinstance(number, torch.Tensor):
        # Not on the default device, which may not be the host.
        number = torch.tensor(number, dtype=tensors[0].dtype, device="cpu")
    return [number] * len(tensors)


@torch.no_grad()
def measure(grads: list[Tensor], options: MeasureOptions = CHECK_ONLY) -> GradientStats:
    """See `Framework.measure`. Updates compute the norms of their rules themselves."""
    chunks = options.leaves and options.leaves.chunks
    if chunks is None and any_sparse(grads):
        grads = [elements_of(g) for g in grads]
    values = shards_of(grads)
    reductions = None if values is grads else Reductions(grads)
    packs = chunks.packs if chunks else Packs(values)
    finite: Tensor = None
    norm: Tensor = None
    amax: Tensor = None
    if options.norm or options.clips:
        norm = (_joint_norm(values, packs, reductions) * options.inv_scale).float()
    if options.clips:
        finite = (norm * options.headroom).square() < torch.inf
    elif not options.amax and is_on_host(values[0]):
        # A norm takes least time. On an accelerator the branch would synchronise.
        if norm is None or reductions:
            are_proven = _are_proven(packs.of(values), options)
        else:
            are_proven = norm * options.headroom < PROOF
        if are_proven:
            finite = values[0].new_ones((), dtype=torch.bool)
    if options.amax or finite is None:
        amax = _largest(values, packs)
    if finite is None:
        finite = _are_finite(values, options.factor, amax)
    amax = amax.float() if options.amax else None
    # All processes have the same norm of all.
    if reductions and (options.amax or not options.clips):
        finite, amax = _reduced(reductions, finite, amax)
    return GradientStats(finite, amax=amax, norm=norm)


def _are_finite(values: list[Tensor], factor: Number, largest: Tensor) -> Tensor:
    """Returns whether values are finite times a factor, given their largest."""
    finite = largest * factor < torch.inf
    if largest.dtype == torch.float64:
        # The others are multiplied in float32, in which a product may overflow.
        narrow = [v for v in values if v.dtype != torch.float64]
        if narrow:
            finite = finite & (_largest(narrow, Packs(narrow)) * factor < torch.inf)
    return finite


def _reduced(
    reductions: Reductions, finite: Tensor, largest: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns whether the shards of all processes are finite, and their largest."""
    scalars = [found_inf_of(finite)]
    if largest is not None:
        # A NaN means no more than an inf here, and a maximum may lose it.
        scalars.append(largest.nan_to_num(nan=torch.inf, posinf=torch.inf))
    overflows, *maxima = reductions.maximum(torch.stack(scalars)).unbind()
    return overflows == 0, maxima[0] if maxima else None


def _joint_norm(
    values: list[Tensor], packs: Packs, reductions: Reductions | None
) -> Tensor:
    """Returns the L2 norm of all tensors together, given this process's shards."""
    if reductions is None:
        return torch.linalg.vector_norm(_wide_norms(packs.of(values)))
    squares = _wide_norms(values).double().square()
    return reductions.sum(squares, range(len(values))).sum().sqrt()


def _are_proven(values: list[Tensor], options: MeasureOptions) -> bool:
    """Returns whether their norm proves that all are finite, also times the factor."""
    dtypes = set(map(dtype_of, values))
    if torch.float16 in dtypes:  # It is quicker to look at each.
        return False
    if dtypes == {torch.float32}:
        # In half the time of norms.
        flat = layouts.flat(values)
        norm = math.sqrt(sum(map(torch.Tensor.item, map(torch.dot, flat, flat))))
    else:
        norms = torch._foreach_norm(values, 2, dtype=wide_dtype(values))
        norm = math.hypot(*map(torch.Tensor.item, norms))
    return norm * float(options.factor) < PROOF


def _wide_norms(values: list[Tensor]) -> Tensor:
    """Returns the L2 norms as one tensor, wider if their squares need the range."""
    if is_on_host(values[0]):
        norms = norms_of(values)
        if USUAL_NORMS[0] < torch.linalg.vector_norm(norms) < USUAL_NORMS[1]:
            return norms
    # Apple's GPUs have no float64.
    has_float64 = values[0].device.type != "mps"
    return norms_of(values, torch.float64 if has_float64 else torch.float32)


class Packs:
    """The tensors so small that one norm of all is faster than a norm of each."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._small = [i for i, t in enumerate(tensors) if t.numel() <= SMALL]
        self._rest = [i for i, t in enumerate(tensors) if t.numel() > SMALL]
        self._are_flat = all(tensors[i].dim() == 1 for i in self._small)

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the tensors, the small ones concatenated in their widest dtype."""
        small = [tensors[i] for i in self._small] if self._rest else tensors
        # A subclass may be sharded, and then cannot be concatenated with others.
        if not small or not set(map(type, small)) <= TENSOR_TYPES:
            return tensors
        if not (self._are_flat or all(map(torch.Tensor.is_contiguous, small))):
            small = layouts.flat(small)
        # Without a view of each tensor, which takes longer than a copy.
        pack = torch.cat(small) if self._are_flat else _flatten_dense_tensors(small)
        return [pack, *map(tensors.__getitem__, self._rest)]


def _largest(values: list[Tensor], packs: Packs) -> Tensor:
    """Returns the largest magnitude as a scalar tensor, or a NaN if there is one."""
    # An empty tensor has no maximum.
    filled = [v for v in packs.of(values) if v.numel()]
    dtype = wide_dtype(filled)
    if not filled:
        return values[0].new_zeros((), dtype=dtype)
    if not is_on_host(values[0]):
        return torch.stack(torch._foreach_norm(filled, math.inf, dtype=dtype)).max()
    # In one pass. A sum in float32 would first copy narrower gradients.
    lows, highs = zip(*map(torch.aminmax, filled), strict=True)
    low, high = lows[0], highs[0]
    if len(filled) > 1:
        low, high = torch.stack(lows).min(), torch.stack(highs).max()
    return torch.maximum(high, -low).to(dtype)


_ROW = 1024


def norms_of(values: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Returns the L2 norms as one tensor, by default in their `wide_dtype`."""
    # On a CPU it works by rows. PyTorch adds squares one by one there, which would
    # leave four digits for two million elements.
    dtype = dtype or wide_dtype(values)
    if values[0].is_cpu and max(map(torch.Tensor.numel, values)) > 4 * _ROW:
        values = [_row_norms(v, dtype) if v.numel() > 4 * _ROW else v for v in values]
    return torch.stack(torch._foreach_norm(values, 2, dtype=dtype))


def _row_norms(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the norms of the rows of a tensor, as one tensor."""
    # In a strided tensor, PyTorch adds eight times as many squares one by one. That
    # takes longer than a copy.
    [flat] = layouts.flat([values])
    end = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1, dtype=dtype)
    if end == flat.numel():
        return rows
    rest = torch.linalg.vector_norm(flat[end:], dtype=dtype)
    return torch.cat([rows, rest.view(1)])


def wide_dtype(values: list[Tensor]) -> torch.dtype:
    """Returns a dtype for norms of these tensors, at least as wide as any of theirs."""
    dtypes = set(map(dtype_of, values))
    return torch.float64 if torch.float64 in dtypes else torch.float32


# --- Shards -------------------------------------------------------------------------


@torch.no_grad()
def norms_of_rules(
    rules: list[Rule],
    grads: list[Tensor],
    inv_scale: Number,
    leaves: Leaves,
    wholes: list[Tensor],
) -> RuleNorms:
    """Returns the norms that rules take of `wholes`, or None, given plain shards."""
    norms, owners = [], []
    tensors: list[Tensor] = []
    triples = zip(rules, grads, leaves.states, strict=True)
    for i, (rule, grad, state) in enumerate(triples):
        if not rule.takes_norms:
            continue
        measured = rule.measured(xp, grad.float() * inv_scale, *state)
        tensors += measured
        owners += [i] * len(measured)
        # The cache should still hold what was just computed.
        if sum(t.numel() for t in tensors) > _CHUNK:
            norms.append(norms_of(tensors))
            tensors = []
    if tensors:
        norms.append(norms_of(tensors))
    results: RuleNorms = [None] * len(rules)
    if owners:
        squares = Reductions(wholes).sum(torch.cat(norms).square(), owners)
        for norm, i in zip(squares.sqrt().unbind(), owners, strict=True):
            results[i] = (*(results[i] or ()), norm)
    return results


_CHUNK = 2**20


@torch.no_grad()
def l2_norms(tensors: list[Tensor]) -> list[Tensor]:
    """See `Framework.l2_norms`."""
    if any_sparse(tensors):
        tensors = [elements_of(t) for t in tensors]
    return list(_norms_of_whole(tensors, shards_of(tensors)).unbind())


def _norms_of_whole(tensors: list[Tensor], shards: list[Tensor]) -> Tensor:
    """Returns the L2 norms of whole tensors as one tensor, given their shards here."""
    norms = norms_of(shards)
    if any_sharded(tensors):
        owners = list(range(len(tensors)))
        norms = Reductions(tensors).sum(norms.square(), owners).sqrt()
    return norms


def unscaled(
    framework: Framework, grads: list[Tensor], inv_scale: Number
) -> list[Tensor]:
    """See `Framework.unscaled`. Makes one call if all gradients are plain tensors."""
    if not set(map(type, grads)) <= TENSOR_TYPES or any_sparse(grads):
        return Framework.unscaled(framework, grads, inv_scale)
    # A scalar tensor does not widen the product.
    wide = [g.float() if g.dtype in _NARROW else g for g in grads]
    if not wide or is_one(inv_scale):
        return wide
    return list(torch._foreach_mul(wide, operands(inv_scale, wide)))


@torch.no_grad()
def clipped(
    grads: list[Tensor], inv_scale: Number, norm: Number = None, value: Number = None
) -> list[Tensor]:
    """See `Framework.clipped`. Returns shards for sharded gradients."""
    wide = [g.float() for g in shards_of(grads)]
    unscaled = torch._foreach_mul(wide, operands(inv_scale, wide))
    if norm:
        norms = _norms_of_whole(grads, unscaled)
        torch._foreach_mul_(unscaled, list((norm / norms.clamp_min(norm)).unbind()))
    else:
        torch._foreach_clamp_min_(unscaled, -value)
        torch._foreach_clamp_max_(unscaled, value)
    return list(unscaled)


# --- Sparse gradients ---------------------------------------------------------------


def any_sparse(tensors: Iterable) -> bool:
    """Whether one of the tensors is not dense, whatever its layout."""
    try:
        return not set(map(_layout_of, tensors)) <= {torch.strided}
    except AttributeError:  # An array, or a number.
        return any(_is_sparse(t) for t in tensors)


def _is_sparse(tensor: Any) -> bool:
    """Whether this is a tensor that is not dense."""
    return isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided


def prepare_gradients(grads: Any) -> Grads:
    """See `Framework.prepare_gradients`."""
    return [to_dense(g) for g in grads] if any_sparse(grads) else grads


def to_dense(grad: Tensor) -> Tensor:
    """See `Framework.to_dense`."""
    return _summed(grad).to_dense() if _is_sparse(grad) else grad


def map_values(fn: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
    """See `Framework.map_values`. Sums the rows of a sparse gradient first."""
    if not _is_sparse(grad):
        return fn(grad)
    summed = _summed(grad)
    return _with_values(summed, fn(summed.values()))


def elements_of(grad: Tensor) -> Tensor:
    """See `Framework.elements_of`."""
    return _summed(grad).values() if _is_sparse(grad) else grad


def _summed(grad: Tensor) -> Tensor:
    """Returns a sparse gradient in which each index occurs once."""
    if grad.layout != torch.sparse_coo:
        grad = grad.to_sparse()
    summed = grad.coalesce()
    if grad.dtype not in _NARROW:
        return summed
    sums, wide = summed.values(), grad.float().coalesce().values()
    return _with_values(summed, torch.where(sums.isfinite(), wide, sums.float()))


def _with_values(grad: Tensor, values: Tensor) -> Tensor:
    """Returns a sparse gradient with other values."""
    return torch.sparse_coo_tensor(
        grad.indices(), values, grad.shape, is_coalesced=True
    )
