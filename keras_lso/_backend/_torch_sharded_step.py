"""`measure`, `fused_step` and `l2_norms` on PyTorch, of plain and of sharded tensors.

The kernels take plain tensors as they are, and of sharded ones the shards of their
process. Norms, the largest magnitude and the flag are reduced over the processes before
they are used, in one all-reduce a step.
"""

import torch

from keras_lso._backend import _torch_kernels, _torch_measure, _torch_steps
from keras_lso._backend._torch_measure import is_on_host
from keras_lso._backend._torch_shards import Agreement, any_sharded, shards_of
from keras_lso._backend.measurement import Measurement


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
    if not (plan.are_sharded if plan else any_sharded(grads)):
        packs = plan and plan.packs
        return _torch_measure.measure(grads, amax, inv_scale, rules, packs, norm)
    agreement = Agreement(grads)
    if norm:
        return _by_the_norm(grads, amax, inv_scale, agreement)
    shards = shards_of(grads)
    mine = _torch_measure.measure(shards, amax, inv_scale)
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
    norms = _norms(rules, squares, owners) if owners else {}
    return Measurement(flag[0] == 0, amax=largest, **norms)


def _by_the_norm(grads, amax, inv_scale, agreement):
    """Returns the `Measurement` where the norm of all gradients must be finite."""
    total = torch.linalg.vector_norm(torch.stack(l2_norms(grads))).float() * inv_scale
    largest = None
    if amax:
        mine = _torch_measure.measure(shards_of(grads), amax, inv_scale)
        largest = agreement.maximum(_without_nan(mine.amax).view(1))[0]
    return Measurement(total.square() < torch.inf, amax=largest, norm=total)


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
            found.append(_torch_measure.norms_of(tensors))
            tensors, size = [], 0
    if tensors:
        found.append(_torch_measure.norms_of(tensors))
    return torch.cat(found).square(), owners


_CHUNK = 2**20


def _norms(rules, squares, owners):
    """Returns the norms of the whole tensors, as fields of a `Measurement`."""
    norms: list = [None] * len(rules)
    for norm, i in zip(squares.sqrt().unbind(), owners, strict=True):
        norms[i] = (*(norms[i] or ()), norm)
    if all(rule.measures_gradient_only for rule in rules):
        return {"gradient_norms": [norm for (norm,) in norms]}
    return {"rule_norms": norms}


@torch.no_grad()
def l2_norms(tensors):
    """See `Framework.l2_norms`."""
    return list(_norms_of_whole(tensors, shards_of(tensors)).unbind())


def _norms_of_whole(tensors, shards):
    """Returns L2 norms as one tensor, of what this process has `shards` of.

    `tensors` say how they are sharded.
    """
    norms = _torch_measure.norms_of(shards)
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


@torch.no_grad()
def fused_step_takes(rule, variables, gradients):
    """Whether there is a kernel for these tensors; `torch.compile` writes its own.

    The processes that share a tensor all return the same.
    """
    return (
        rule in _torch_steps.STEPS
        and not torch.compiler.is_compiling()
        and set(map(type, shards_of((*variables, *gradients)))) <= _PLAIN
        and variables[0].device.type in _torch_kernels.DEVICES
        and len({t.device for t in (*variables, *gradients)}) == 1
        and {w.dtype for w in variables} == {torch.float32}
        and {g.dtype for g in gradients} <= _GRADIENT_DTYPES
        and {g.layout for g in gradients} == {torch.strided}
        and all(w.is_contiguous() for w in variables)
        and [g.shape for g in gradients] == [w.shape for w in variables]
    )


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_GRADIENT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def fused_step(framework, rules, targets, grads, found=None, inv_scale=None):
    """See `Framework.fused_step`."""
    plan, variables = targets.plan, targets.variables
    if plan.are_sharded if plan else any_sharded(variables):
        whole, grads = grads, shards_of(grads)
        targets = targets._replace(
            variables=shards_of(variables),
            slots=[tuple(shards_of(of_one)) for of_one in targets.slots],
            copies=targets.copies and shards_of(targets.copies),
        )
        found = found or Measurement(None)
        has_norms = found.gradient_norms or found.rule_norms
        if any(r.has_norms for r in rules) and not has_norms:
            # `measure` was not asked for them: the step may change the masters.
            masters = _resynchronised(framework, targets.variables, targets.copies)
            factor = 1.0 if inv_scale is None else inv_scale
            state = targets._replace(variables=masters)
            squares, owners = _squares(rules, grads, factor, state)
            squares = Agreement(whole).sum(squares, owners)
            found = found._replace(**_norms(rules, squares, owners))
    _torch_steps.fused_step(framework, rules, targets, grads, found, inv_scale)


@torch.no_grad()
def run_masked(flag, step):
    """See `Framework.run_masked`."""
    if not is_on_host(flag) or flag:
        step()


@torch.no_grad()
def clear(tensors, flag):
    """See `Framework.clear`; `w - w` in the kernel that can leave `w` as it is."""
    shards = shards_of(tensors)
    if not is_on_host(flag):
        found_inf = torch.logical_not(flag).float()
        _torch_kernels.Kernel(shards, True, None, found_inf).decay(1.0)
    elif flag:
        torch._foreach_zero_(shards)


def _resynchronised(framework, variables, copies):
    return [
        v if copy is None else framework.resynchronised(v, copy)
        for v, copy in zip(variables, copies or [None] * len(variables), strict=True)
    ]
