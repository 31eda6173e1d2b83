"""The fused step on PyTorch, and how it implements each rule of `rules.py`.

Tensors are processed in the chunks of a `StepPlan`: plain ones as they are, and of
sharded ones the shards of this process. On the host the flag `finite` is read first. On
an accelerator that would synchronise: the kernels take `found_inf`, 1.0 on an overflow,
and then write nothing.
"""

import itertools
from collections.abc import Callable

import torch

from keras_lso._backend import layer_rules, rules
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.torch import kernels as torch_kernels
from keras_lso._backend.torch.kernels import (
    SMALLEST_RATE,
    Kernel,
    moving_averages,
)
from keras_lso._backend.torch.masters import resynchronise, round_into_variables
from keras_lso._backend.torch.measure import is_on_host, norms_of, norms_of_rules
from keras_lso._backend.torch.plan import StepPlan
from keras_lso._backend.torch.scalars import TorchScalars
from keras_lso._backend.torch.shards import shards_of
from keras_lso._backend.torch.triton import steps as torch_triton


@torch.no_grad()
def fused_step_takes(rule, variables, gradients, slots=()):
    """Whether there is a kernel for these tensors; `torch.compile` writes its own.

    The processes that share a tensor all return the same.
    """
    return (
        rule in STEPS
        and not torch.compiler.is_compiling()
        and set(map(type, shards_of((*variables, *gradients)))) <= _PLAIN
        and variables[0].device.type in torch_kernels.DEVICES
        and len({t.device for t in (*variables, *gradients)}) == 1
        and {w.dtype for w in variables} == {torch.float32}
        and {g.dtype for g in gradients} <= _GRADIENT_DTYPES
        and {g.layout for g in gradients} == {torch.strided}
        and all(t.is_contiguous() for t in itertools.chain(variables, *slots))
        and [g.shape for g in gradients] == [w.shape for w in variables]
    )


_SCALARS = TorchScalars()
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_GRADIENT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def fused_step(framework, rules, targets, grads, found=None, inv_scale=None):
    """See `Framework.fused_step`."""
    plan = targets.plan or StepPlan(list(map(id, rules)), targets, grads)
    found = Measurement(None) if found is None else found
    inv_scale = 1.0 if inv_scale is None else inv_scale
    if plan.are_sharded:
        found = _with_norms(framework, rules, targets, grads, found, inv_scale)
        grads = shards_of(grads)
    first = plan.chunks[0].variables[0]
    finite, on_host = found.finite, is_on_host(first)
    if on_host:
        if finite is not None and not finite:
            return
        finite = None
    grads = plan.readable(grads)
    memory = plan.memory() if on_host else None
    found_inf = None if finite is None else torch.logical_not(finite).float()
    if not on_host:
        torch_triton.decide(plan, rules, grads)
    for chunk in plan.chunks:
        are_wide, positions, weights, columns, pairs = chunk
        rule = rules[positions[0]]
        own, known = grads, found
        if len(plan.chunks) > 1:
            own, known = [grads[i] for i in positions], _part(found, positions)
        if not on_host and torch_triton.step(
            plan, chunk, rule, own, inv_scale, known, found_inf
        ):
            continue
        kernel = Kernel(weights, are_wide, memory, found_inf, targets.owns_gradients)
        if pairs:
            resynchronise(framework, pairs, finite, memory)
        STEPS[type(rule)](kernel, rule, own, inv_scale, known, *columns)
        if not targets.are_private:
            # Autograd relies on it, and the fused kernels do not do it.
            for column in (weights, *columns):
                torch.autograd.graph.increment_version(column)
        if pairs:
            round_into_variables(pairs, finite, found_inf)


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

    `measure` is not asked for them where the step may re-initialise the masters.
    """
    has_norms = found.gradient_norms or found.rule_norms
    if has_norms or not any(rule.has_norms for rule in rules):
        return found
    variables, copies = shards_of(targets.variables), targets.copies
    if copies is not None:
        pairs = zip(variables, shards_of(copies), strict=True)
        variables = [
            v if copy is None else framework.resynchronised(v, copy)
            for v, copy in pairs
        ]
    state = targets._replace(variables=variables)
    return found._replace(**norms_of_rules(rules, grads, inv_scale, state))


@torch.no_grad()
def synchronise_masters(framework, targets, flag):
    """See `Framework.synchronise_masters`."""
    on_host = is_on_host(flag)
    if on_host and not flag:
        return
    plan = targets.plan
    memory = plan.memory() if on_host else None
    for chunk in plan.chunks:
        if chunk.pairs:
            resynchronise(framework, chunk.pairs, None if on_host else flag, memory)


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
        Kernel(shards, True, None, found_inf).decay(1.0)
    elif flag:
        torch._foreach_zero_(shards)


# --- The rules ----------------------------------------------------------------------
#
# Each `_step_*` implements the formula of the class in `rules.py` that `STEPS` has it
# for, and is tested against it. `found` is the `Measurement` of the gradients `g`; for
# shards it holds the norms of the whole tensors, and the steps are the same.


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


def _step_nadam(kernel, rule, g, inv_scale, found, m, v):
    # In Keras's order, which rounds alike.
    g = kernel.multiply(g, inv_scale)
    new_m = kernel.averages(m, g, rule.beta_1)
    new_v = kernel.averages(v, torch._foreach_mul(g, g), rule.beta_2)
    steps = torch._foreach_mul(new_m, rule.next_momentum)
    torch._foreach_div_(steps, 1 - rule.next_product)
    present = torch._foreach_mul(g, 1 - rule.momentum)
    torch._foreach_div_(present, 1 - rule.product)
    torch._foreach_add_(steps, present)
    torch._foreach_mul_(steps, rule.learning_rate)
    roots = torch._foreach_div(new_v, 1 - rule.beta_2_power)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, rule.epsilon)
    kernel.decay(rule.decay)
    torch._foreach_div_(steps, roots)
    kernel.descend(steps)
    kernel.assign(m, new_m)
    kernel.assign(v, new_v)


def _step_adamax(kernel, rule, g, inv_scale, found, m, u):
    # In Keras's order, which rounds alike.
    g = kernel.multiply(g, inv_scale)
    new_m = kernel.averages(m, g, rule.beta_1)
    new_u = kernel.product(u, rule.beta_2)
    torch._foreach_maximum_(new_u, torch._foreach_abs(g))
    steps = torch._foreach_mul(new_m, rule.learning_rate)
    divisors = torch._foreach_add(new_u, rule.epsilon)
    torch._foreach_mul_(divisors, 1 - rule.beta_1_power)
    kernel.decay(rule.decay)
    torch._foreach_div_(steps, divisors)
    kernel.descend(steps)
    kernel.assign(m, new_m)
    kernel.assign(u, new_u)


def _step_lion(kernel, rule, g, inv_scale, found, m):
    g = kernel.multiply(g, inv_scale)
    kernel.decay(rule.decay)
    directions = moving_averages(m, g, rule.beta_1)
    torch._foreach_sign_(directions)
    kernel.descend(directions, rule.learning_rate)
    kernel.assign(m, kernel.averages(m, g, rule.beta_2))


def _step_rmsprop(kernel, rule, g, inv_scale, found, v):
    g = kernel.multiply(g, inv_scale)
    new_v = kernel.averages(v, torch._foreach_mul(g, g), rule.rho)
    _descend_by_roots(kernel, rule, g, v, new_v)


def _step_adagrad(kernel, rule, g, inv_scale, found, v):
    g = kernel.multiply(g, inv_scale)
    new_v = kernel.sum(v, torch._foreach_mul(g, g))
    _descend_by_roots(kernel, rule, g, v, new_v)


def _descend_by_roots(kernel, rule, g, v, new_v):
    # In Keras's order, which rounds alike.
    steps = torch._foreach_mul(g, rule.learning_rate)
    roots = torch._foreach_add(new_v, rule.epsilon)
    torch._foreach_sqrt_(roots)
    kernel.decay(rule.decay)
    torch._foreach_div_(steps, roots)
    kernel.descend(steps)
    kernel.assign(v, new_v)


def _step_average(kernel, rule, g, inv_scale, found):
    averages = kernel.product(kernel.weights, rule.momentum)
    g = kernel.multiply(g, inv_scale)
    torch._foreach_add_(averages, torch._foreach_mul(g, 1 - rule.momentum))
    kernel.assign(kernel.weights, averages)


def _step_overwrite(kernel, rule, g, inv_scale, found):
    # A kernel of its own memory: `assign` writes what it is given.
    kernel.assign(kernel.weights, list(torch._foreach_mul(g, inv_scale)))


def _step_lars(kernel, rule, g, inv_scale, found, v):
    if rule.classic_momentum:
        d, norms, unit = _lars_directions(kernel, rule, g, inv_scale, found)
        rates = _rates(kernel, rule, found, norms) * unit
        kernel.descend_with_rates(d, v, rule.momentum, rates, rule.nesterov)
        return
    d = _lars_decayed(kernel, rule, kernel.multiply(g, inv_scale))
    # First the momentum alone: the variables' rate is of the norm of their update.
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
    """Returns directions `d`, the norms that their rates need or None, and a unit.

    The step subtracts `rate * unit * d`. The norms are in the unit of 1.
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
        # Before the decay is added to the gradients.
        of_gradients = found.gradient_norms
        norms = norms_of(g) if of_gradients is None else torch.stack(of_gradients)
    d = _lars_decayed(kernel, rule, g)
    if needs_norms and not rule.is_paper:
        norms = norms_of(d)
    return d, norms, 1.0


def _rates(kernel, rule, found, norms):
    """Returns the learning rate of each tensor, as one tensor."""
    if rule.trust_ratio is None:
        return rule.learning_rate.expand(len(kernel.weights))
    if found.rule_norms is not None:
        norms = tuple(map(torch.stack, zip(*found.rule_norms, strict=True)))
        return rule.rate(norms, _SCALARS)
    return rule.rate((norms, norms_of(kernel.weights)), _SCALARS)


def _step_lamb(kernel, rule, g, inv_scale, found, m, v):
    g, scale = kernel.multiply_in_kernel(g, inv_scale)
    d = kernel.directions_of_lamb(rule, g, m, v, scale)
    norms = norms_of(d) if _needs_norms(rule, found) else None
    kernel.descend_each(d, _rates(kernel, rule, found, norms))


def _step_keras_lamb(kernel, rule, g, inv_scale, found, m, v):
    # In Keras's order, which rounds alike; its bias correction too is in float32.
    g = kernel.multiply(g, inv_scale)
    new_m = kernel.averages(m, g, rule.beta_1)
    new_v = kernel.averages(v, torch._foreach_mul(g, g), rule.beta_2)
    roots = torch._foreach_div(new_v, 1 - rule.beta_2**rule.step)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, rule.epsilon)
    d = torch._foreach_div(new_m, 1 - rule.beta_1**rule.step)
    torch._foreach_div_(d, roots)
    kernel.decay(rule.decay)
    norms = norms_of(d) if _needs_norms(rule, found) else None
    kernel.descend_each(d, _rates(kernel, rule, found, norms))
    kernel.assign(m, new_m)
    kernel.assign(v, new_v)


def _step_novograd(kernel, rule, g, inv_scale, found, m, v):
    norms, factor = found.gradient_norms, inv_scale
    if norms is None:
        g, factor = kernel.multiply(g, inv_scale), 1.0
        norms = norms_of(g).unbind()
    elif not kernel.are_wide:
        g = kernel.widen(g)
    new_v, factors = rule.normalize(torch.stack(norms), torch.stack(v))
    factors = factors * (rule.direction_weight * factor)
    d = kernel.multiply_each(g, factors.unbind())
    if rule.weight_decay:
        d = kernel.add(d, kernel.weights, rule.weight_decay * rule.direction_weight)
    kernel.descend_with_momentum(d, m, rule.beta_1, rate=rule.learning_rate)
    kernel.assign(v, new_v.unbind())


STEPS: dict[type, Callable[..., None]] = {
    rules.SGD: _step_sgd,
    rules.Momentum: _step_momentum,
    rules.Adam: _step_adam,
    rules.Nadam: _step_nadam,
    rules.Adamax: _step_adamax,
    rules.Lion: _step_lion,
    rules.RMSprop: _step_rmsprop,
    rules.Adagrad: _step_adagrad,
    rules.Average: _step_average,
    rules.Overwrite: _step_overwrite,
    layer_rules.LARS: _step_lars,
    layer_rules.LAMB: _step_lamb,
    layer_rules.KerasLamb: _step_keras_lamb,
    layer_rules.NovoGrad: _step_novograd,
}
