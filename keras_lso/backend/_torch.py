"""The primitives on PyTorch: eager, in place."""

import contextlib
import math
from collections.abc import Callable

import torch
from torch.utils import _pytree

from keras_lso.backend import generic
from keras_lso.backend._torch_processes import (
    AVERAGES_IN_STEP,
    average_over_processes,
    check_processes_run,
    count_processes,
)
from keras_lso.backend.generic import (
    Measurement,
    check_replica_context,
    compile_step,
    is_traced,
    is_variable,
    outside_of_functions,
    register_list_class,
    total,
)
from keras_lso.backend.rules import LARS, NovoGrad

__all__ = [
    "AVERAGES_IN_STEP",
    "average_over_processes",
    "check_processes_run",
    "check_replica_context",
    "compile_step",
    "compute_gradients",
    "count_processes",
    "differentiate",
    "fused_step",
    "fused_step_takes",
    "is_traced",
    "is_variable",
    "l2_norms",
    "map_values",
    "measure",
    "outside_of_functions",
    "register_list_class",
    "run_if",
    "to_dense",
    "total",
    "trained_variables",
    "with_positions",
]


@torch.no_grad()
def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None):
    """See `generic.measure`.

    A finite norm proves finite elements, and one multi-tensor norm costs a
    tenth of `isfinite` over all tensors. A norm that is not finite proves
    nothing (1e20 squared is inf), nor does any if unscaling makes the gradients
    larger: only then every element is looked at.

    The norms of what no rule changes before it takes the norm serve the step as
    well. It measures the others itself, where it has them in the cache.
    """
    values = [_values(g) for g in grads]
    if rules:
        norms = _norms(values)
    else:
        # As a proof any norm will do.
        norms = torch.stack(torch._foreach_norm(values, 2, dtype=_wide_dtype(values)))
    finite = norms.isfinite().all()
    if finite & (inv_scale <= 1):
        unscaled_norms = list((norms * inv_scale).unbind()) if rules else None
    else:
        finite, unscaled_norms = _all_finite(values, inv_scale), None
    return Measurement(finite, unscaled_norms, _largest(values) if amax else None)


def _largest(values):
    """Returns the largest magnitude; `abs` would write a copy of every tensor."""
    values = [v for v in values if v.numel()]
    if not values:
        return generic.largest_magnitude(values)
    ends = [end.float() for v in values for end in (v.max(), -v.min())]
    return torch.stack(ends).max()


@torch.no_grad()
def l2_norms(tensors):
    """See `generic.l2_norms`.

    By rows: PyTorch adds up one square after the other, and of two million elements
    four digits would be left.
    """
    return list(_norms([_values(t) for t in tensors]).unbind())


_ROW = 1024


def _norms(values):
    """Returns the norms as one tensor."""
    dtype = _wide_dtype(values)
    rows = [_row_norms(v, dtype) if v.numel() > 4 * _ROW else v for v in values]
    return torch.stack(torch._foreach_norm(rows, 2, dtype=dtype))


def _row_norms(values, dtype):
    flat = values.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    if whole == flat.numel():
        return rows
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.cat([rows, rest.view(1)])


def _wide_dtype(values):
    # A norm may accumulate in a wider type than its tensor's, never a narrower one.
    is_double = any(v.dtype == torch.float64 for v in values)
    return torch.float64 if is_double else torch.float32


def _all_finite(values, inv_scale):
    values = [generic.in_float32(v) for v in values]
    return torch.stack([(v * inv_scale).isfinite().all() for v in values]).all()


def run_if(finite, step, grads, state):
    """See `generic.run_if`."""
    if finite:
        step(grads)


# The number of elements that a kernel works on at a time, unless one tensor has more:
# what one of its operations has written is then still in the cache for the next.
_CHUNK = 2**20


@torch.no_grad()
def fused_step(rules, variables, slots, grads, finite=None, inv_scale=None, norms=None):
    """See `generic.fused_step`."""
    if finite is not None and not finite:
        return
    state = [
        [v.value for v in (variable, *slot)]
        for variable, slot in zip(variables, slots, strict=True)
    ]
    chunks = _chunks(rules, [tensors[0] for tensors in state])
    # One for all chunks: fresh memory costs more than the arithmetic on it.
    largest = max(sum(state[i][0].numel() for i in chunk) for chunk in chunks)
    scratch = state[0][0].new_empty(largest)
    for chunk in chunks:
        rule = rules[chunk[0]]
        _KERNELS[type(rule)](
            rule,
            [grads[i] for i in chunk],
            inv_scale,
            norms and [norms[i] for i in chunk],
            _views(scratch, [state[i][0] for i in chunk]),
            *zip(*(state[i] for i in chunk), strict=True),
        )


def _chunks(rules, tensors):
    """Splits the positions into chunks of one rule, small enough for the cache."""
    chunks: list[list[int]] = []
    open_chunks: dict[int, tuple[list[int], float]] = {}
    for i, (rule, tensor) in enumerate(zip(rules, tensors, strict=True)):
        chunk, size = open_chunks.get(id(rule), ([], math.inf))
        if size + tensor.numel() > _CHUNK:
            chunk, size = [], 0
            chunks.append(chunk)
        chunk.append(i)
        open_chunks[id(rule)] = chunk, size + tensor.numel()
    return chunks


def _views(memory, tensors):
    """Returns pieces of `memory` with the tensors' shapes."""
    sizes = [t.numel() for t in tensors]
    pieces = memory[: sum(sizes)].split(sizes)
    return [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)]


def _step_lars(rule, g, inv_scale, norms, scratch, w, v):
    if inv_scale is not None:
        g = _multiply(g, [inv_scale] * len(g), scratch)
    rates = None
    if rule.classic_momentum and (rule.is_paper or not rule.weight_decay):
        # What `measure` found are norms of the gradients.
        rates = _lars_rates(rule, g, w, norms)
    d = g
    if rule.weight_decay:
        for g_i, w_i, out in zip(g, w, scratch, strict=True):
            torch.add(g_i, w_i, alpha=rule.weight_decay, out=out)
        d = scratch
    if rule.classic_momentum:
        d = _multiply(d, rates or _lars_rates(rule, d, w), scratch)
        _step_momentum(d, w, v, rule.momentum, rule.nesterov)
        return
    torch._foreach_mul_(v, rule.momentum)
    torch._foreach_add_(v, d)
    update = v
    if rule.nesterov:
        for d_i, v_i, out in zip(d, v, scratch, strict=True):
            torch.add(d_i, v_i, alpha=rule.momentum, out=out)
        update = scratch
    torch._foreach_sub_(w, _multiply(update, _lars_rates(rule, update, w), scratch))


def _step_novograd(rule, g, inv_scale, norms, scratch, w, m, v):
    factor = 1.0 if inv_scale is None else inv_scale
    if norms is None:
        if inv_scale is not None:
            g, factor = _multiply(g, [inv_scale] * len(g), scratch), 1.0
        norms = _norms(g).unbind()
    new_v, factors = rule.normalize(torch.stack(norms), torch.stack(v))
    d = _multiply(g, (factors * (rule.share * factor)).unbind(), scratch)
    if rule.weight_decay:
        torch._foreach_add_(d, w, alpha=rule.weight_decay * rule.share)
    _step_momentum(d, w, m, rule.beta_1, learning_rate=rule.learning_rate)
    torch._foreach_copy_(v, new_v.unbind())


def _step_momentum(d, w, m, momentum, nesterov=False, learning_rate=1.0):
    """Moves `w` and `m` along `d`, which may be written to."""
    if not momentum:
        # The kernel has no slot then.
        torch._foreach_copy_(m, d)
        torch._foreach_mul_(d, learning_rate)
        torch._foreach_sub_(w, d)
        return
    torch._fused_sgd_(
        w,
        d,
        m,
        lr=learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        dampening=0.0,
        weight_decay=0.0,
        maximize=False,
        is_first_step=False,
    )


def _multiply(tensors, factors, out):
    for tensor, factor, out_i in zip(tensors, factors, out, strict=True):
        torch.mul(tensor, factor, out=out_i)
    return out


def _lars_rates(rule, direction, w, norms=None):
    """Returns the learning rate of each tensor, 0-d tensors."""
    if rule.trust_ratio is None:
        return [rule.learning_rate] * len(w)
    if norms is None:
        d_norms, w_norms = _norms([*direction, *w]).split(len(w))
    else:
        d_norms, w_norms = torch.stack(norms), _norms(w)
    return list(rule.rate((d_norms, w_norms)).unbind())


_KERNELS: dict[type, Callable[..., None]] = {
    LARS: _step_lars,
    NovoGrad: _step_novograd,
}


def fused_step_takes(rule, variables, gradients):
    """Whether there is a kernel for these tensors; `torch.compile` writes its own."""
    return (
        rule in _KERNELS
        and not torch.compiler.is_compiling()
        and all(
            _is_plain(g) and _is_plain(w) and w.is_contiguous() and g.shape == w.shape
            for g, w in zip(gradients, (v.value for v in variables), strict=True)
        )
    )


def _is_plain(tensor):
    """Whether this is a dense float32 tensor of a device that has fused kernels."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype == torch.float32
        and tensor.device.type in ("cpu", "cuda")
    )


def compute_gradients(loss_fn, variables, grad_loss=None, tape=None):
    """See `generic.compute_gradients`."""
    generic.refuse_tape(tape)
    known = () if callable(variables) else [v.value for v in variables]
    with torch.enable_grad(), _requiring_grad(known):
        loss = torch.as_tensor(loss_fn())
        if callable(variables):
            variables = variables()
        return loss, _gradients(loss, variables, grad_loss)


def differentiate(loss, variables, transform, grad_loss=None, tape=None):
    """See `generic.differentiate`."""
    generic.refuse_tape(tape)
    with torch.enable_grad():
        return _gradients(transform(loss), variables, grad_loss)


def _gradients(loss, variables, grad_loss):
    values = [v.value for v in variables]
    # Autograd refuses those that it was never told to follow.
    followed = [v for v in values if v.requires_grad]
    if not loss.requires_grad or not followed:
        return [None] * len(variables)
    weights = generic.weights_of(loss, grad_loss)
    grads = iter(torch.autograd.grad(loss, followed, weights, allow_unused=True))
    return [next(grads) if v.requires_grad else None for v in values]


@contextlib.contextmanager
def _requiring_grad(tensors):
    """Lets autograd follow variables that are not trainable, too."""
    frozen = [t for t in tensors if not t.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


@torch.no_grad()
def trained_variables(loss_fn):
    """See `generic.trained_variables`."""
    return generic.trained_variables(loss_fn)


def with_positions(items):
    """See `generic.with_positions`."""
    return [(_pytree.SequenceKey(i), item) for i, item in enumerate(items)]


def map_values(fn, grad):
    """See `generic.map_values`."""
    return fn(grad)


def to_dense(grad):
    """See `generic.to_dense`: Keras has no sparse gradients on PyTorch."""
    return grad


def _values(grad):
    return grad.detach()
