"""The fused step on PyTorch: formulas on lists of tensors, and faster kernels for some.

A step processes tensors in `Chunks`. For sharded tensors, it processes the shards of
this process. On the host the flag `finite` is read first. On an accelerator reading it
would synchronise. So the kernels take `found_inf`, which is 1.0 after an overflow, and
then write nothing.
"""

import itertools
from collections.abc import Callable

import torch

from keras_lso._backend import formulas
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.rule import Norms, always
from keras_lso._backend.torch import kernels as torch_kernels
from keras_lso._backend.torch import lists
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.chunks import Chunks
from keras_lso._backend.torch.kernels import (
    SMALLEST_RATE,
    Kernel,
)
from keras_lso._backend.torch.lists import Tensors
from keras_lso._backend.torch.masters import numbers_of, pairs_of, resynchronise
from keras_lso._backend.torch.measure import PLAIN, norms_of, norms_of_rules
from keras_lso._backend.torch.scalars import TorchScalars
from keras_lso._backend.torch.shards import shards_of


@torch.no_grad()
def fused_step_takes(rule, targets, gradients):
    """Whether there is a kernel for these tensors; `torch.compile` writes its own.

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
        and variables[0].device.type in torch_kernels.DEVICES
        and len({t.device for t in (*variables, *gradients)}) == 1
        and targets.are_float32
        and {g.dtype for g in gradients} <= _GRADIENT_DTYPES
        and {g.layout for g in gradients} == {torch.strided}
        and all(map(torch.Tensor.is_contiguous, in_float32))
        and [g.shape for g in gradients] == [w.shape for w in variables]
    )


_SCALARS = TorchScalars()
_GRADIENT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def fused_step(framework, rules, targets, grads, found=None, inv_scale=None):
    """See `Framework.fused_step`."""
    chunks = targets.chunks or Chunks(list(map(id, rules)), targets, grads)
    found = Measurement(None) if found is None else found
    inv_scale = 1.0 if inv_scale is None else inv_scale
    if chunks.are_sharded:
        found = _with_norms(framework, rules, targets, grads, found, inv_scale)
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
    for chunk in chunks.items:
        are_wide, positions, weights, columns, *_ = chunk
        rule = rules[positions[0]]
        own, known = grads, found
        if len(chunks.items) > 1:
            own, known = [grads[i] for i in positions], _part(found, positions)
        numbers = None
        if chunk.narrow:
            numbers = numbers_of(framework, chunk, memory, finite)
            weights = numbers.tensors
        kernel = Kernel(weights, are_wide, memory, found_inf, targets.owns_gradients)
        STEPS[rule.kernel](kernel, rule, own, inv_scale, known, *columns)
        if not targets.are_private:
            # Autograd relies on the version, and the fused kernels do not increment it.
            for column in (chunk.numbers or [], *columns):
                torch.autograd.graph.increment_version(column)
        if numbers is not None:
            numbers.write(found_inf, iterations)


def _part(found, chunk):
    """Returns the `Measurement` of the tensors of a chunk."""
    of_gradients, of_rules = found.gradient_norms, found.rule_norms
    if of_gradients is None and of_rules is None:
        return found
    return Measurement(
        found.finite,
        of_gradients and [of_gradients[i] for i in chunk],
        of_rules and [of_rules[i] for i in chunk],
    )


def _with_norms(framework, rules, targets, grads, found, inv_scale):
    """Returns the `Measurement` of sharded gradients with the norms of their rules.

    `measure` does not compute these norms if the step may re-initialise the masters.
    """
    has_norms = found.gradient_norms or found.rule_norms
    if has_norms or rules[0].norms is Norms.NONE:
        return found
    pairs = zip(shards_of(targets.variables), targets.weights, strict=True)
    variables = [
        v if n is None else n.stored(v, shards_of).number(framework) for v, n in pairs
    ]
    state = targets._replace(variables=variables, narrow=None)
    return found._replace(**norms_of_rules(rules, grads, inv_scale, state))


@torch.no_grad()
def synchronise_masters(framework, targets, flag):
    """See `Framework.synchronise_masters`."""
    on_host = torch_measure.is_on_host(flag)
    if on_host and not flag:
        return
    chunks = targets.chunks
    memory = chunks.memory() if on_host else None
    for chunk in chunks.items:
        pairs = pairs_of(chunk)
        if pairs:
            resynchronise(framework, pairs, None if on_host else flag, memory)


@torch.no_grad()
def run_masked(flag, step):
    """See `Framework.run_masked`."""
    if not torch_measure.is_on_host(flag) or flag:
        step()


@torch.no_grad()
def clear(tensors, flag):
    """See `Framework.clear`. The kernel of `w - w` can also leave `w` as it is."""
    shards = shards_of(tensors)
    if not torch_measure.is_on_host(flag):
        found_inf = torch.logical_not(flag).float()
        Kernel(shards, True, None, found_inf).decay(1.0)
    elif flag:
        torch._foreach_zero_(shards)


# --- The rules ----------------------------------------------------------------------
#
# Each `_step_*` implements the formula of the rules whose `kernel` is its key in
# `STEPS`, and is tested against it. `_step_by_formula` runs the formula of any other
# rule. `found` is the `Measurement` of the gradients `g`. For shards it holds the norms
# of the whole tensors, and the steps are the same.


def _step_sgd(kernel, rule, g, inv_scale, found):
    rate, scale = rule.learning_rate * inv_scale, None
    kernel.decay(rule.decay)
    if not kernel.are_wide:
        g, scale = kernel.multiply_in_kernel(g, rate)
        rate = 1.0
    kernel.descend(g, rate, scale)


def _step_momentum(kernel, rule, g, inv_scale, found, m):
    product = rule.learning_rate * inv_scale
    kernel.decay(rule.decay)
    rate, scale = 0.0, None
    if kernel.is_on_host and not rule.nesterov and kernel.are_wide:
        rate = float(product)
    if not rate >= SMALLEST_RATE:
        g, scale = kernel.multiply_in_kernel(g, product)
        rate = 1.0
    kernel.ascend_with_momentum(g, m, rule.momentum, rate, rule.nesterov, scale)


def _step_adam(kernel, rule, g, inv_scale, found, m, v):
    g, scale = kernel.multiply_in_kernel(g, inv_scale)
    kernel.decay(rule.decay)
    kernel.adam(rule, g, m, v, scale)


def _step_lars(kernel, rule, g, inv_scale, found, v):
    if rule.classic_momentum:
        d, norms, unit = _lars_directions(kernel, rule, g, inv_scale, found)
        rates = _rates(kernel, rule, found, norms) * unit
        kernel.descend_with_rates(d, v, rule.momentum, rates, rule.nesterov)
        return
    d = _lars_decayed(kernel, rule, kernel.multiply(g, inv_scale))
    # First the momentum alone: a variable's rate depends on the norm of its update.
    kernel.descend_with_momentum(d, v, rule.momentum, rate=0.0)
    update = kernel.add(d, v, rule.momentum) if rule.nesterov else v
    norms = norms_of(update) if _needs_norms(rule, found) else None
    rates = _rates(kernel, rule, found, norms)
    kernel.descend(kernel.multiply_each(update, rates.unbind()))


def _needs_norms(rule, found):
    """Whether the step has to compute the norms that `rule` takes."""
    return rule.takes_norms and found.rule_norms is None


def _lars_decayed(kernel, rule, g):
    return kernel.add(g, kernel.weights, rule.weight_decay) if rule.weight_decay else g


def _lars_directions(kernel, rule, g, inv_scale, found):
    """Returns directions `d`, the norms for their rates (or None), and a unit.

    The step subtracts `rate * unit * d`. The norms are in units of 1, not of `unit`.
    """
    needs_norms = _needs_norms(rule, found)
    is_wide_on_host = kernel.is_on_host and kernel.are_wide
    if needs_norms and not rule.is_paper and is_wide_on_host:
        if rule.weight_decay:
            # In units of the decay: one pass in place of two.
            d = kernel.add(kernel.weights, g, float(inv_scale) / rule.weight_decay)
            norms = norms_of(d)
            # In this unit the norm of a large gradient may overflow.
            if norms.isfinite().all():
                return d, norms * rule.weight_decay, rule.weight_decay
        elif found.gradient_norms is not None:
            return g, torch.stack(found.gradient_norms), inv_scale
    g, norms = kernel.multiply(g, inv_scale), None
    if needs_norms and rule.is_paper:
        # The norms of the gradients before the decay is added to them.
        of_gradients = found.gradient_norms
        norms = norms_of(g) if of_gradients is None else torch.stack(of_gradients)
    d = _lars_decayed(kernel, rule, g)
    if needs_norms and not rule.is_paper:
        norms = norms_of(d)
    return d, norms, 1.0


def _stacked(rule_norms):
    """Returns for each kind of norm one tensor, with the norms of a chunk's tensors."""
    return tuple(map(torch.stack, zip(*rule_norms, strict=True)))


def _rates(kernel, rule, found, norms):
    """Returns the learning rate of each tensor, as one tensor."""
    if rule.trust_ratio is None:
        return rule.learning_rate.expand(len(kernel.weights))
    if found.rule_norms is not None:
        return rule.rate(_stacked(found.rule_norms), _SCALARS)
    return rule.rate((norms, norms_of(kernel.weights)), _SCALARS)


def _step_lamb(kernel, rule, g, inv_scale, found, m, v):
    g, scale = kernel.multiply_in_kernel(g, inv_scale)
    d = kernel.directions_of_lamb(rule, g, m, v, scale)
    norms = norms_of(d) if _needs_norms(rule, found) else None
    kernel.descend_each(d, _rates(kernel, rule, found, norms))


def _step_novograd(kernel, rule, g, inv_scale, found, m, v):
    norms, factor = found.gradient_norms, inv_scale
    if norms is None:
        g, factor = kernel.multiply(g, inv_scale), 1.0
        norms = norms_of(g).unbind()
    elif not kernel.are_wide:
        g = kernel.widen(g)
    new_v, factors = rule.normalize(formulas, torch.stack(norms), torch.stack(v))
    factors = factors * (rule.direction_weight * factor)
    d = kernel.multiply_each(g, factors.unbind())
    if rule.weight_decay:
        d = kernel.add(d, kernel.weights, rule.weight_decay * rule.direction_weight)
    kernel.descend_with_momentum(d, m, rule.beta_1, rate=rule.learning_rate)
    kernel.assign(v, new_v.unbind())


def _step_by_formula(kernel, rule, g, inv_scale, found, *columns):
    g = Tensors(kernel.multiply(g, inv_scale))
    old = [Tensors(column) for column in (kernel.weights, *columns)]
    norms = None
    if rule.takes_norms and found.rule_norms is None:
        norms = tuple(norms_of(t.items) for t in rule.measured(lists, g, *old))
    elif rule.takes_norms:
        norms = _stacked(found.rule_norms)
    # On an accelerator the whole step is masked where it is written.
    select = Tensors.written_over if kernel.is_on_host else always
    new = rule(lists, select, g, *old, norms=norms)
    for target, value in zip(old, new, strict=True):
        if value is not target:
            kernel.assign(target.items, value.items)


# Keyed by `Rule.kernel`.
STEPS: dict[str | None, Callable[..., None]] = {
    None: _step_by_formula,
    "sgd": _step_sgd,
    "momentum": _step_momentum,
    "adam": _step_adam,
    "lars": _step_lars,
    "lamb": _step_lamb,
    "novograd": _step_novograd,
}
