"""`measure`, `fused_step` and `l2_norms` on PyTorch, of sharded tensors as well.

Plain tensors go to the kernels as they are. Of sharded ones each process hands them its
shards, and norms, the largest magnitude and whether all is finite are agreed on before
anybody uses them: one all-reduce a step.
"""

import torch

from keras_lso.backend import (
    _torch_kernels,
    _torch_masters,
    _torch_measure,
    rules,
)
from keras_lso.backend._torch_shards import Agreement, any_sharded, shards_of
from keras_lso.backend.generic import Measurement


@torch.no_grad()
def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None, are_alike=False):
    """See `generic.measure`."""
    if not any_sharded(grads):
        return _torch_measure.measure(grads, amax, inv_scale, rules, state)
    shards = shards_of(grads)
    mine = _torch_measure.measure(shards, amax, inv_scale)
    squares, owners = _squares(rules, shards, inv_scale, state)
    agreement = Agreement(grads)
    flag = torch.logical_not(mine.finite).to(squares.dtype).view(1)
    top = None
    if amax:
        # A NaN says no more than an inf.
        top = mine.amax.nan_to_num(nan=torch.inf, posinf=torch.inf).to(flag.dtype)
        flag, top = agreement.maximum(torch.stack([flag[0], top])).split(1)
        squares = agreement.total(squares, owners) if owners else squares
    else:
        both = agreement.total(torch.cat([flag, squares]), [None, *owners])
        flag, squares = both[:1], both[1:]
    return Measurement(
        flag[0] == 0,
        _norms(squares, owners, len(grads)) if owners else None,
        None if top is None else top[0].float(),
    )


def _squares(of_step, shards, inv_scale, state):
    """Returns the squares of the norms that the rules of a step take of these shards.

    Returns:
        A tuple of a tensor, and the list of the positions of the shards that its items
        are of.
    """
    found, owners = [shards[0].new_zeros(0, dtype=torch.float32)], []
    tensors: list[torch.Tensor] = []
    size = 0
    for i, rule in enumerate(of_step or ()):
        measured = _measured(rule, shards[i], inv_scale, state[i])
        tensors += measured
        owners += [i] * len(measured)
        size += shards[i].numel()
        # What was computed to be measured should still be in the cache.
        if tensors and size > _CHUNK:
            found.append(_torch_measure.norms_of(tensors))
            tensors, size = [], 0
    if tensors:
        found.append(_torch_measure.norms_of(tensors))
    return torch.cat(found).square(), owners


_CHUNK = 2**20


def _measured(rule, shard, inv_scale, state):
    """Returns the tensors that `rule.norms` takes the norms of."""
    if not rule.has_norms or (isinstance(rule, rules.LARS) and not rule.trust_ratio):
        return ()
    g = shard.float() * inv_scale
    if rule.measures_gradient_only:
        return (g,)
    variable, *slots = shards_of(state)
    return rule.direction(g, variable, *slots), variable


def _norms(squares, owners, count):
    """Returns what `rule.norms` would return of the whole tensors, for each of them."""
    norms: list = [None] * count
    for norm, i in zip(squares.sqrt().unbind(), owners, strict=True):
        norms[i] = (*(norms[i] or ()), norm)
    return norms


@torch.no_grad()
def l2_norms(tensors):
    """See `generic.l2_norms`."""
    norms = _torch_measure.norms_of(shards_of(tensors))
    if any_sharded(tensors):
        owners = list(range(len(tensors)))
        norms = Agreement(tensors).total(norms.square(), owners).sqrt()
    return list(norms.unbind())


@torch.no_grad()
def fused_step_takes(rule, variables, gradients):
    """Whether there is a kernel for these tensors; `torch.compile` writes its own.

    Of sharded tensors all processes have to give the same answer.
    """
    # Neither variables without a tensor of their own nor other subclasses of tensors.
    return (
        rule in _torch_kernels.STEPS
        and not torch.compiler.is_compiling()
        and set(map(type, shards_of((*variables, *gradients)))) <= _PLAIN
        and variables[0].device.type in _DEVICES
        and len({t.device for t in (*variables, *gradients)}) == 1
        and {w.dtype for w in variables} == {torch.float32}
        and {g.dtype for g in gradients} <= _GRADIENT_DTYPES
        and {g.layout for g in gradients} == {torch.strided}
        and all(w.is_contiguous() for w in variables)
        and [g.shape for g in gradients] == [w.shape for w in variables]
    )


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_DEVICES = ("cpu", "cuda")
_GRADIENT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def fused_step(
    rules,
    variables,
    slots,
    grads,
    finite=None,
    inv_scale=None,
    norms=None,
    narrow=None,
):
    """See `generic.fused_step`."""
    if not any_sharded(variables):
        _torch_kernels.fused_step(
            rules, variables, slots, grads, finite, inv_scale, norms, narrow
        )
        return
    narrow = narrow or [None] * len(variables)
    if norms is None and any(rule.has_norms for rule in rules):
        norms = _norms_in_step(rules, variables, slots, grads, inv_scale, narrow)
    _torch_kernels.fused_step(
        rules,
        shards_of(variables),
        [tuple(shards_of(of_one)) for of_one in slots],
        shards_of(grads),
        finite,
        inv_scale,
        norms,
        shards_of(narrow),
        steps=_STEPS,
    )


def _norms_in_step(rules, variables, slots, grads, inv_scale, narrow):
    """Returns the norms where nobody has measured them yet."""
    state = []
    for variable, of_one, low in zip(variables, slots, narrow, strict=True):
        value, low = shards_of((variable, low))
        if low is not None:
            value = _torch_masters.restarted(value, low)
        state.append((value, *of_one))
    inv_scale = 1.0 if inv_scale is None else inv_scale
    squares, owners = _squares(rules, shards_of(grads), inv_scale, state)
    squares = Agreement(grads).total(squares, owners)
    return _norms(squares, owners, len(grads))


def _step_lars(kernel, rule, g, inv_scale, norms, v):
    g = kernel.multiply(g, inv_scale)
    d = kernel.add(g, kernel.weights, rule.weight_decay) if rule.weight_decay else g
    if rule.trust_ratio is None:
        rates = rule.learning_rate.expand(len(g))
    else:
        rates = rule.rate(tuple(map(torch.stack, zip(*norms, strict=True))))
    if rule.classic_momentum:
        kernel.descend_by_shares(d, v, rule.momentum, rates, rule.nesterov)
        return
    # The variables come after their momentum.
    kernel.descend_with_momentum(d, v, rule.momentum, rate=0.0)
    update = kernel.add(d, v, rule.momentum) if rule.nesterov else v
    kernel.descend(kernel.multiply_each(update, rates.unbind()))


def _step_novograd(kernel, rule, g, inv_scale, norms, m, v):
    norms = [norm for (norm,) in norms]
    _torch_kernels.STEPS[rules.NovoGrad](kernel, rule, g, inv_scale, norms, m, v)


# With norms of whole tensors, which a kernel cannot take itself.
_STEPS = {
    **_torch_kernels.STEPS,
    rules.LARS: _step_lars,
    rules.NovoGrad: _step_novograd,
}
