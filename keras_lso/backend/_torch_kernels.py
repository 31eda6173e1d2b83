"""The rules as PyTorch's own fused kernels.

Those kernels unscale by themselves, but they write what they unscale back into the
caller's gradients. Here a gradient is only ever read: where it can be, the scale goes
into a coefficient of the kernel, and elsewhere the gradients are unscaled into memory
of the step's own, as many at a time as fit into the cache.

On the host the caller has looked at `finite` already. On an accelerator nobody looks:
`found_inf`, 1.0 on an overflow, goes to the kernels, which then write nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors

from keras_lso.backend import rules
from keras_lso.backend._torch_masters import restart, round_into_variables
from keras_lso.backend._torch_measure import SMALL, is_on_host, norms_of
from keras_lso.backend.masters import pairs_of

# The number of elements that a kernel works on at a time, unless one tensor has more:
# what one of its operations has written is then still in the cache for the next.
_HOST_CHUNK = 2**20
_DEVICE_CHUNK = 2**23
# What is subtracted from 1 in float64 must keep the digits of a float32.
_SMALLEST_SHARE = 2.0**-29
# So late that nothing is left of Adam's bias correction, for any beta below 1.
_LAST_STEP = 2.0**100


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
    steps=None,
):
    """See `generic.fused_step`; `steps` has for each rule what does its step."""
    steps = steps or STEPS
    on_host = is_on_host(variables[0])
    if on_host:
        if finite is not None and not finite:
            return
        finite = None
    narrow = narrow or [None] * len(variables)
    grads = _own_gradients(grads, [*variables, *narrow])
    kinds = [
        (id(r), None if low is None else low.dtype)
        for r, low in zip(rules, narrow, strict=True)
    ]
    chunks = _chunks(kinds, variables, _HOST_CHUNK if on_host else _DEVICE_CHUNK)
    memory = _Memory(variables, chunks) if on_host else None
    found_inf = None if finite is None else torch.logical_not(finite).float()
    for chunk in chunks:
        kernel = _Kernel([variables[i] for i in chunk], memory, found_inf)
        pairs = pairs_of(kernel.weights, [narrow[i] for i in chunk])
        restart(pairs, finite, memory)
        rule = rules[chunk[0]]
        steps[type(rule)](
            kernel,
            rule,
            [grads[i] for i in chunk],
            1.0 if inv_scale is None else inv_scale,
            norms and [norms[i] for i in chunk],
            *map(list, zip(*(slots[i] for i in chunk), strict=True)),
        )
        round_into_variables(pairs, finite, found_inf)


def _own_gradients(grads, written):
    """Returns the gradients as the kernels can read them while these are written.

    A kernel goes through all its tensors in the order of their memory. A gradient that
    is a variable under another name would change before it is read.
    """
    written = {t.data_ptr() for t in written if t is not None} - {0}
    return [(g.clone() if g.data_ptr() in written else g).contiguous() for g in grads]


def _chunks(kinds, tensors, limit):
    """Splits the positions into chunks of one kind, of at most `limit` elements."""
    by_kind: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(i)
    sizes = [t.numel() for t in tensors]
    chunks: list[list[int]] = []
    for positions in by_kind.values():
        total: float = math.inf
        for i in positions:
            total += sizes[i]
            if total > limit:
                chunks.append([])
                total = sizes[i]
            chunks[-1].append(i)
    return chunks


def any_is_narrow(tensors):
    return any(t.dtype != torch.float32 for t in tensors)


class _Memory:
    """One piece for all chunks: fresh memory costs more than the arithmetic on it."""

    def __init__(self, tensors, chunks):
        self._sizes = (sum(tensors[i].numel() for i in chunk) for chunk in chunks)
        self._like = tensors[0]
        self._flat = None

    def like(self, tensors):
        """Returns pieces of it like `tensors`, which are of one chunk and one dtype."""
        if self._flat is None:
            self._flat = self._like.new_empty(max(self._sizes))
        return _unflatten_dense_tensors(self._flat.view(tensors[0].dtype), tensors)


class _Kernel:
    """What the steps of a chunk are made of, in place.

    Args:
        weights: List of the chunk's variables, tensors.
        memory: A `_Memory` for intermediate results. None on an accelerator, whose
            allocator hands out the same memory again at once.
        found_inf: Float32 scalar tensor, 1.0 where nothing may be written. None on
            the host.
    """

    def __init__(self, weights, memory, found_inf):
        self.weights = weights
        self._memory = memory
        self._found_inf = found_inf

    @property
    def is_on_host(self):
        return self._memory is not None

    def new(self):
        """Returns tensors like the weights; on the host the same ones each time."""
        if self._memory is None:
            return [torch.empty_like(w) for w in self.weights]
        return self._memory.like(self.weights)

    def widen(self, tensors):
        """Returns the tensors in float32."""
        if not any_is_narrow(tensors):
            return tensors
        wide = self.new()
        torch._foreach_copy_(wide, tensors)
        return wide

    def multiply(self, tensors, factor):
        """Returns the products with a scalar (tensor), in float32."""
        # A scalar tensor does not widen the product.
        tensors = self.widen(tensors)
        if isinstance(factor, float) and factor == 1.0:
            return tensors
        # For small ones fresh memory is no matter, and a call for each of them is.
        if not self.is_on_host or all(t.numel() <= SMALL for t in tensors):
            return list(torch._foreach_mul(tensors, factor))
        return self.multiply_each(tensors, [factor] * len(tensors))

    def multiply_each(self, tensors, factors):
        """Returns the products of float32 tensors, each with a factor of its own.

        None stands for the tensor as it is.
        """
        out = self.new()
        return [
            t if factor is None else torch.mul(t, factor, out=out_i)
            for t, factor, out_i in zip(tensors, factors, out, strict=True)
        ]

    def add(self, tensors, others, alpha):
        """Returns `tensors + alpha * others`; `alpha` is a float."""
        # Which PyTorch refuses where float32 has no such small number.
        alpha = float(np.float32(alpha))
        if not self.is_on_host:
            return list(torch._foreach_add(tensors, others, alpha=alpha))
        return [
            torch.add(t, other, alpha=alpha, out=out_i)
            for t, other, out_i in zip(tensors, others, self.new(), strict=True)
        ]

    def descend(self, directions, rate=1.0):
        """Does `w = w - rate * d`."""
        _sgd(self.weights, directions, [], self._found_inf, lr=rate, momentum=0.0)

    def descend_with_momentum(self, d, m, momentum, rate=1.0, nesterov=False):
        """Does `m = momentum * m + d`, `w = w - rate * m`.

        If `nesterov`, it is `w = w - rate * (momentum * m + d)`.
        """
        _sgd(self.weights, d, m, self._found_inf, rate, momentum, nesterov)

    def descend_by_shares(self, d, m, momentum, shares, nesterov=False):
        """Does `m = momentum * m + share * d`, `w = w - m`.

        Args:
            d: List of tensors.
            m: List of tensors.
            momentum: Float.
            shares: Float32 tensor, a share for each of them.
            nesterov: Bool. Whether to do `w = w - (momentum * m + share * d)`.
        """
        by_kernel = {}
        if self.is_on_host and momentum and not nesterov:
            # A call takes as long as the product with a tensor of this size.
            large = (i for i, w in enumerate(self.weights) if w.numel() > 2**15)
            values = shares.tolist()
            by_kernel = {i: values[i] for i in large if values[i] >= _SMALLEST_SHARE}
        factors = [
            None if i in by_kernel else share for i, share in enumerate(shares.unbind())
        ]
        d = self.multiply_each(d, factors)
        triples = list(zip(self.weights, d, m, strict=True))
        for i, share in by_kernel.items():
            w_i, d_i, m_i = ([tensor] for tensor in triples[i])
            _sgd(w_i, d_i, m_i, None, 1.0, momentum, dampening=1.0 - share)
        rest = [triple for i, triple in enumerate(triples) if i not in by_kernel]
        if rest:
            w, d, m = zip(*rest, strict=True)
            _sgd(w, d, m, self._found_inf, 1.0, momentum, nesterov)

    def ascend_with_momentum(self, d, m, momentum, share=1.0, nesterov=False):
        """Does `m = momentum * m - share * d`, `w = w + m`; `share` is a float.

        If `nesterov`, `share` is 1 and it is `w = w + momentum * m - d`.
        """
        _sgd(
            self.weights,
            d,
            m,
            self._found_inf,
            lr=-1.0,
            momentum=momentum,
            nesterov=nesterov,
            dampening=1.0 - share,
            maximize=True,
        )

    def decay(self, share):
        """Does `w = w - share * w`, if `share` is not None."""
        if share is not None:
            # The kernel reads an element before it writes it.
            self.descend(self.weights, share)

    def adam(self, rule, grads, momenta, velocities, scale=None):
        """Does Adam's step, whose `alpha` holds the bias correction already.

        Args:
            rule: `rules.Adam`.
            grads: List of float32 tensors.
            momenta: List of tensors.
            velocities: List of tensors.
            scale: Scalar tensor, what the kernel divides the gradients by, in place:
                they are the step's own. Defaults to `None`: nothing.
        """
        last = rule.alpha.new_full((), _LAST_STEP)
        torch._fused_adam_(
            self.weights,
            grads,
            momenta,
            velocities,
            [],
            [last] * len(grads),
            lr=rule.alpha,
            beta1=rule.beta_1,
            beta2=rule.beta_2,
            weight_decay=0.0,
            eps=rule.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=self._found_inf,
        )

    def where_finite(self, new, old):
        """Returns `new`, on an overflow `old`."""
        if self._found_inf is None:
            return new
        return torch.where(self._found_inf == 0, new, old)


def _sgd(
    w,
    d,
    m,
    found_inf,
    lr,
    momentum,
    nesterov=False,
    dampening=0.0,
    maximize=False,
):
    """Calls the kernel.

    `m = momentum * m + (1 - dampening) * d`, `w = w - lr * m`. With `maximize` it is
    `-d` in place of `d`.
    """
    has_no_past = bool(m) and not momentum
    torch._fused_sgd_(
        w,
        d,
        m,
        lr=lr,
        # To the kernel a momentum of 0 means that there is no slot.
        momentum=1.0 if has_no_past else momentum,
        nesterov=nesterov and not has_no_past,
        weight_decay=0.0,
        dampening=dampening,
        maximize=maximize,
        is_first_step=has_no_past,
        found_inf=found_inf,
    )


def _step_sgd(kernel, rule, g, inv_scale, norms):
    rate = rule.learning_rate * inv_scale
    kernel.decay(rule.decay)
    if any_is_narrow(g):
        g, rate = kernel.multiply(g, rate), 1.0
    kernel.descend(g, rate)


def _step_momentum(kernel, rule, g, inv_scale, norms, m):
    rate = rule.learning_rate * inv_scale
    kernel.decay(rule.decay)
    share = 0.0
    if kernel.is_on_host and not rule.nesterov and not any_is_narrow(g):
        share = float(rate)
    if not share >= _SMALLEST_SHARE:
        g, share = kernel.multiply(g, rate), 1.0
    kernel.ascend_with_momentum(g, m, rule.momentum, share, rule.nesterov)


def _step_adam(kernel, rule, g, inv_scale, norms, m, v):
    scale = None
    if not kernel.is_on_host and any_is_narrow(g) and torch.is_tensor(inv_scale):
        # On the way to float32 they are copied anyway: one pass less.
        g, scale = kernel.widen(g), 1.0 / inv_scale
    else:
        g = kernel.multiply(g, inv_scale)
    kernel.decay(rule.decay)
    kernel.adam(rule, g, m, v, scale)


def _step_lars(kernel, rule, g, inv_scale, norms, v):
    if not rule.classic_momentum:
        d = _lars_directions(kernel, rule, kernel.multiply(g, inv_scale))
        _step_lars_popular(kernel, rule, d, v)
        return
    if rule.is_paper or rule.trust_ratio is None:
        g = kernel.multiply(g, inv_scale)
        # What `measure` found are norms of the gradients, which are the paper's.
        g_norms = None
        if rule.is_paper:
            g_norms = norms_of(g) if norms is None else torch.stack(norms)
        shares = _lars_rates(kernel, rule, g_norms)
        d = _lars_directions(kernel, rule, g)
    else:
        d, d_norms, unit = _lars_directions_and_norms(kernel, rule, g, inv_scale, norms)
        shares = _lars_rates(kernel, rule, d_norms) * unit
    kernel.descend_by_shares(d, v, rule.momentum, shares, rule.nesterov)


def _step_lars_popular(kernel, rule, d, v):
    # The variables come after the norm of their update.
    kernel.descend_with_momentum(d, v, rule.momentum, rate=0.0)
    update = kernel.add(d, v, rule.momentum) if rule.nesterov else v
    rates = _lars_rates(kernel, rule, norms_of(update))
    kernel.descend(kernel.multiply_each(update, rates.unbind()))


def _lars_directions(kernel, rule, g):
    """Returns the decayed directions of unscaled gradients."""
    return kernel.add(g, kernel.weights, rule.weight_decay) if rule.weight_decay else g


def _lars_directions_and_norms(kernel, rule, g, inv_scale, norms):
    """Returns the directions, their norms, and what to multiply the directions by."""
    is_wide_on_host = kernel.is_on_host and not any_is_narrow(g)
    if is_wide_on_host and not rule.weight_decay and norms is not None:
        return g, torch.stack(norms), inv_scale
    if is_wide_on_host and rule.weight_decay:
        # In one pass, not two, and in units of the decay.
        d = kernel.add(kernel.weights, g, float(inv_scale) / rule.weight_decay)
        d_norms = norms_of(d)
        # In these a large gradient can overflow where in others it does not.
        if d_norms.isfinite().all():
            return d, d_norms * rule.weight_decay, rule.weight_decay
    d = _lars_directions(kernel, rule, kernel.multiply(g, inv_scale))
    return d, norms_of(d), 1.0


def _lars_rates(kernel, rule, d_norms):
    """Returns the learning rate of each tensor, as one tensor."""
    if rule.trust_ratio is None:
        return rule.learning_rate.expand(len(kernel.weights))
    return rule.rate((d_norms, norms_of(kernel.weights)))


def _step_novograd(kernel, rule, g, inv_scale, norms, m, v):
    factor = inv_scale
    if norms is None:
        g, factor = kernel.multiply(g, inv_scale), 1.0
        norms = norms_of(g).unbind()
    old_v = torch.stack(v)
    new_v, factors = rule.normalize(torch.stack(norms), old_v)
    shares = factors * (rule.share * factor)
    d = kernel.multiply_each(kernel.widen(g), shares.unbind())
    if rule.weight_decay:
        d = kernel.add(d, kernel.weights, rule.weight_decay * rule.share)
    kernel.descend_with_momentum(d, m, rule.beta_1, rate=rule.learning_rate)
    torch._foreach_copy_(v, kernel.where_finite(new_v, old_v).unbind())


STEPS: dict[type, Callable[..., None]] = {
    rules.SGD: _step_sgd,
    rules.Momentum: _step_momentum,
    rules.Adam: _step_adam,
    rules.LARS: _step_lars,
    rules.NovoGrad: _step_novograd,
}
