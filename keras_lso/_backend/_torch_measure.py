"""Reading the gradients once, on PyTorch: `measure`, of plain and of sharded tensors.

Of sharded tensors each process reads its shards. Norms, the largest magnitude and the
flag are reduced over the processes before they are used, in one all-reduce a step.
"""

import math
import operator

import torch
from torch._utils import _flatten_dense_tensors

from keras_lso._backend._torch_shards import Agreement, any_sharded, shards_of
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.tensors import amax_of, in_float32

# Elements. The cost of an operation on a smaller tensor is that of its call.
SMALL = 2**14

_dtype_of = operator.attrgetter("dtype")


def is_on_host(tensor):
    """Whether the host reads this tensor without synchronising."""
    return tensor.device.type == "cpu"


@torch.no_grad()
def measure(
    grads,
    amax=False,
    inv_scale=1.0,
    rules=None,
    targets=None,
    are_alike=False,
    norm=False,
):
    """See `Framework.measure`."""
    plan = targets and targets.plan
    if plan.are_sharded if plan else any_sharded(grads):
        return _measure_shards(grads, amax, inv_scale, rules, targets, norm)
    return _measure(grads, amax, inv_scale, rules, plan and plan.packs, norm)


# --- Plain tensors ------------------------------------------------------------------


def _measure(grads, amax, inv_scale, rules=None, packs=None, norm=False):
    """Returns the `Measurement` of plain tensors.

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
    largest = None
    if amax:
        on_host = is_on_host(grads[0])
        largest = _amax_on_host(grads) if on_host else _largest(grads).float()
    return _of_norms(norms, inv_scale, largest)


def _of_norms(norms, inv_scale, largest):
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms)
    total = (norm * inv_scale).float()
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


# --- Shards -------------------------------------------------------------------------


def _measure_shards(grads, amax, inv_scale, rules, targets, norm):
    """Returns the `Measurement` of tensors some of which are sharded."""
    agreement = Agreement(grads)
    if norm:
        return _by_the_norm_of_shards(grads, amax, inv_scale, agreement)
    shards = shards_of(grads)
    mine = _measure(shards, amax, inv_scale)
    squares, owners = _squares(rules, shards, inv_scale, targets)
    flag = torch.logical_not(mine.finite).to(squares.dtype).view(1)
    largest = None
    if amax:
        largest = _without_nan(mine.amax).to(flag.dtype)
        both = agreement.maximum(torch.stack([flag[0], largest]))
        flag, largest = both[:1], both[1].float()
        squares = agreement.sum(squares, owners) if owners else squares
    else:
        both = agreement.sum(torch.cat([flag, squares]), [None, *owners])
        flag, squares = both[:1], both[1:]
    norms = _norms_by_rule(rules, squares, owners) if owners else {}
    return Measurement(flag[0] == 0, amax=largest, **norms)


def _by_the_norm_of_shards(grads, amax, inv_scale, agreement):
    """Returns the `Measurement` where the norm of all gradients must be finite."""
    norms = _norms_of_whole(grads, shards_of(grads))
    largest = None
    if amax:
        mine = _measure(shards_of(grads), amax, inv_scale)
        largest = agreement.maximum(_without_nan(mine.amax).view(1))[0]
    return _of_norms(norms, inv_scale, largest)


def _without_nan(amax):
    # A NaN says no more than an inf, and a maximum may lose it.
    return amax.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _squares(rules, shards, inv_scale, targets):
    """Returns the squared norms of what the rules measure of these shards.

    As one tensor, with the list of the positions of the shards that its items are of.
    """
    found, owners = [shards[0].new_zeros(0, dtype=torch.float32)], []
    tensors: list[torch.Tensor] = []
    size = 0
    states = targets.states if rules else ()
    for i, rule in enumerate(rules or ()):
        if not rule.takes_norms:
            continue
        unscaled = shards[i].float() * inv_scale
        measured = rule.measured(unscaled, *shards_of(states[i]))
        tensors += measured
        owners += [i] * len(measured)
        size += shards[i].numel()
        # The cache should still hold what was just computed.
        if size > _CHUNK:
            found.append(norms_of(tensors))
            tensors, size = [], 0
    if tensors:
        found.append(norms_of(tensors))
    return torch.cat(found).square(), owners


_CHUNK = 2**20


def _norms_by_rule(rules, squares, owners):
    """Returns the norms of the whole tensors, as fields of a `Measurement`."""
    norms: list = [None] * len(rules)
    for norm, i in zip(squares.sqrt().unbind(), owners, strict=True):
        norms[i] = (*(norms[i] or ()), norm)
    if all(rule.measures_gradient_only for rule in rules):
        return {"gradient_norms": [norm for (norm,) in norms]}
    return {"rule_norms": norms}


def norms_of_rules(rules, grads, inv_scale, targets):
    """Returns what rules measure of sharded tensors, as fields of a `Measurement`.

    For a step whose `measure` was not asked for it: the step may change the masters.
    `targets` are the shards that it writes.
    """
    squares, owners = _squares(rules, shards_of(grads), inv_scale, targets)
    return _norms_by_rule(rules, Agreement(grads).sum(squares, owners), owners)


@torch.no_grad()
def l2_norms(tensors):
    """See `Framework.l2_norms`."""
    return list(_norms_of_whole(tensors, shards_of(tensors)).unbind())


def _norms_of_whole(tensors, shards):
    """Returns L2 norms as one tensor, of what this process has `shards` of.

    `tensors` say how they are sharded.
    """
    norms = norms_of(shards)
    if any_sharded(tensors):
        owners = list(range(len(tensors)))
        norms = Agreement(tensors).sum(norms.square(), owners).sqrt()
    return norms


@torch.no_grad()
def clipped(grads, inv_scale, norm=None, value=None):
    """See `Framework.clipped`; of shards, shards."""
    unscaled = torch._foreach_mul([g.float() for g in shards_of(grads)], inv_scale)
    if norm:
        norms = _norms_of_whole(grads, unscaled)
        torch._foreach_mul_(unscaled, list((norm / norms.clamp_min(norm)).unbind()))
    else:
        torch._foreach_clamp_min_(unscaled, -value)
        torch._foreach_clamp_max_(unscaled, value)
    return list(unscaled)
