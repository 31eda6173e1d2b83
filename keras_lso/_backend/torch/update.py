"""The update of variables by a rule on PyTorch, in chunks of tensors.

A rule is a formula on lists of tensors (`lists.py`). SGD and Adam have kernels of
PyTorch's own, which unscale, update and skip in one pass. For sharded tensors a chunk
has the shards of this process.

On the host the flag is read first. On an accelerator reading it would synchronise, so
the kernels take `found_inf`, which is 1.0 where the flag is False, and then write
nothing.
"""

import itertools
from collections.abc import Callable

import torch

from keras_lso._backend.measurement import Measurement
from keras_lso._backend.rule import always
from keras_lso._backend.torch import lists
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.chunks import Chunks
from keras_lso._backend.torch.kernels import (
    DEVICES,
    SMALLEST_RATE,
    Pass,
    copy_unless,
    fused_adam,
    fused_sgd,
)
from keras_lso._backend.torch.lists import Tensors
from keras_lso._backend.torch.masters import numbers_of, resynchronise
from keras_lso._backend.torch.measure import PLAIN, norms_of, norms_of_rules
from keras_lso._backend.torch.shards import shards_of

_GRADIENT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def fused_step_takes(rule, targets, gradients):
    """Whether there is an update of these tensors; `torch.compile` writes its own.

    All processes that share a tensor return the same.
    """
    variables = targets.variables
    in_float32 = [
        *(v for v, n in zip(variables, targets.weights, strict=True) if n is None),
        *(n.kept for n in targets.in_place),
        *itertools.chain(*targets.slots),
    ]
    return (
        not torch.compiler.is_compiling()
        and set(map(type, shards_of((*variables, *gradients)))) <= PLAIN
        and variables[0].device.type in DEVICES
        and len({t.device for t in (*variables, *gradients)}) == 1
        and targets.are_float32
        and {g.dtype for g in gradients} <= _GRADIENT_DTYPES
        and {g.layout for g in gradients} == {torch.strided}
        and all(map(torch.Tensor.is_contiguous, in_float32))
        and [g.shape for g in gradients] == [w.shape for w in variables]
    )


@torch.no_grad()
def fused_step(framework, rules, targets, grads, found=None, inv_scale=None):
    """See `Framework.fused_step`."""
    chunks = targets.chunks or Chunks(list(map(id, rules)), targets, grads)
    found = Measurement(None) if found is None else found
    inv_scale = 1.0 if inv_scale is None else inv_scale
    norms = found.rule_norms
    if chunks.are_sharded:
        if norms is None and rules[0].has_norms:
            norms = _norms_of_shards(framework, rules, targets, grads, inv_scale)
        grads = shards_of(grads)
    first = chunks.items[0].variables[0]
    finite, on_host = found.finite, torch_measure.is_on_host(first)
    if on_host:
        if finite is not None and not finite:
            return
        finite = None
    grads = chunks.readable(grads)
    iterations = None if targets.iterations is None else targets.iterations.value
    memory = chunks.memory() if on_host else None
    found_inf = None if finite is None else torch.logical_not(finite).float()
    one = Pass(inv_scale, memory, found_inf, targets.owns_gradients)
    for chunk in chunks.items:
        positions, rule = chunk.positions, rules[chunk.positions[0]]
        weights, numbers = chunk.variables, None
        if chunk.narrow:
            numbers = numbers_of(framework, chunk, memory, finite)
            weights = numbers.tensors
        own = [grads[i] for i in positions]
        known = norms and [norms[i] for i in positions]
        STEPS[rule.kernel](rule, one, weights, own, known, *chunk.slots)
        if not targets.are_private:
            # Autograd relies on the version, and the fused kernels do not increment it.
            for column in (chunk.numbers or [], *chunk.slots):
                torch.autograd.graph.increment_version(column)
        if numbers is not None:
            numbers.write(found_inf, iterations)


def _norms_of_shards(framework, rules, targets, grads, inv_scale):
    """Returns the norms that rules take of the whole tensors, for each of them."""
    pairs = zip(shards_of(targets.variables), targets.weights, strict=True)
    variables = [
        v if n is None else n.stored(v, shards_of).number(framework) for v, n in pairs
    ]
    state = targets._replace(variables=variables, narrow=None)
    return norms_of_rules(rules, grads, inv_scale, state)


@torch.no_grad()
def synchronise_masters(framework, targets, flag):
    """See `Framework.synchronise_masters`."""
    on_host = torch_measure.is_on_host(flag)
    if on_host and not flag:
        return
    chunks = targets.chunks
    memory = chunks.memory() if on_host else None
    for chunk in chunks.items:
        if chunk.keeps_numbers:
            resynchronise(framework, chunk, memory)


@torch.no_grad()
def run_masked(flag, step):
    """See `Framework.run_masked`."""
    if not torch_measure.is_on_host(flag) or flag:
        step()


@torch.no_grad()
def clear(tensors, flag):
    """See `Framework.clear`."""
    shards = shards_of(tensors)
    if not torch_measure.is_on_host(flag):
        torch._foreach_mul_(shards, torch.logical_not(flag).float())
    elif flag:
        torch._foreach_zero_(shards)


# --- The rules ----------------------------------------------------------------------


def _step_sgd(rule, one, w, g, norms):
    one.decay(w, rule.decay)
    rate = rule.learning_rate * one.factor
    if one.are_wide(g):
        fused_sgd(w, g, [], one.found_inf, lr=rate)
    else:
        g, scale = one.scaled_in_kernel(g, rate)
        fused_sgd(w, g, [], one.found_inf, lr=1.0, scale=scale)


def _step_momentum(rule, one, w, g, norms, m):
    one.decay(w, rule.decay)
    product = rule.learning_rate * one.factor
    rate, scale = 0.0, None
    if one.is_on_host and not rule.nesterov and one.are_wide(g):
        # The kernel multiplies a gradient by `1 - dampening`, in float64.
        rate = float(product)
    if not rate >= SMALLEST_RATE:
        g, scale = one.scaled_in_kernel(g, product)
        rate = 1.0
    # With `maximize` the kernel subtracts the gradient: `m = momentum * m - rate * g`.
    fused_sgd(
        w,
        g,
        m,
        one.found_inf,
        lr=-1.0,
        momentum=rule.momentum,
        nesterov=rule.nesterov,
        dampening=1.0 - rate,
        maximize=True,
        scale=scale,
    )


def _step_adam(rule, one, w, g, norms, m, v):
    one.decay(w, rule.decay)
    g, scale = one.scaled_in_kernel(g, one.factor)
    fused_adam(rule, w, g, m, v, one.found_inf, scale)


def _step_by_formula(rule, one, w, g, norms, *slots):
    g = Tensors(one.scaled(g, one.factor))
    old = [Tensors(w)]
    for name, column in zip(rule.slots, slots, strict=True):
        old.append(torch.stack(column) if name in rule.scalars else Tensors(column))
    if norms is not None:
        norms = tuple(map(torch.stack, zip(*norms, strict=True)))
    elif rule.takes_norms:
        norms = tuple(norms_of(t.items) for t in rule.measured(lists, g, *old))
    # On an accelerator the whole step is masked where it is written.
    new = rule(lists, _written if one.is_on_host else always, g, *old, norms=norms)
    for column, target, value in zip((w, *slots), old, new, strict=True):
        if value is target:
            continue
        values = value.items if isinstance(value, Tensors) else value.unbind()
        if one.found_inf is None:
            torch._foreach_copy_(column, values)
        else:
            copy_unless(one.found_inf, column, values)


def _written(new, old):
    """A `select` that writes a new value over the old one where that saves a pass."""
    return new.written_over(old) if isinstance(new, Tensors) else new


# Keyed by `Rule.kernel`.
STEPS: dict[str | None, Callable[..., None]] = {
    None: _step_by_formula,
    "sgd": _step_sgd,
    "momentum": _step_momentum,
    "adam": _step_adam,
}
