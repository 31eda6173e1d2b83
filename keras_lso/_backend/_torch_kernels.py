"""What the fused steps of a chunk of tensors are made of: PyTorch's own fused kernels.

Those kernels unscale by themselves, but they write what they unscale back into the
caller's gradients. Here a gradient is only ever read: where it can be, the scale goes
into a coefficient of the kernel, and elsewhere the gradients are unscaled into memory
of the step's own.
"""

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors

from keras_lso._backend._torch_measure import SMALL

# What is subtracted from 1 in float64 must keep the digits of a float32.
SMALLEST_RATE = 2.0**-29
# So late that Adam's bias correction is 1, for any beta below 1.
_LAST_STEP = 2.0**100


def any_low_precision(tensors):
    """Whether a tensor is not in float32."""
    return any(t.dtype != torch.float32 for t in tensors)


class Memory:
    """One buffer for all chunks: fresh memory costs more than the arithmetic on it.

    Args:
        tensors: List of float32 tensors.
        chunks: List of lists of their positions.
    """

    def __init__(self, tensors, chunks):
        self._sizes = (sum(tensors[i].numel() for i in chunk) for chunk in chunks)
        self._like = tensors[0]
        self._flat = None

    def like(self, tensors):
        """Returns views of it like `tensors`, which are of one chunk and one dtype."""
        if self._flat is None:
            self._flat = self._like.new_empty(max(self._sizes))
        return _unflatten_dense_tensors(self._flat.view(tensors[0].dtype), tensors)


class Kernel:
    """The operations on a chunk of variables, in place.

    Args:
        weights: List of the chunk's variables, tensors.
        memory: `Memory` for intermediate results. None on an accelerator, whose
            allocator returns the same memory again at once.
        found_inf: Float32 scalar tensor, 1.0 where nothing may be written. None on
            the host.
    """

    def __init__(self, weights, memory, found_inf):
        self.weights = weights
        self._memory = memory
        self._found_inf = found_inf

    @property
    def is_on_host(self):
        """Whether reading a tensor on the host costs nothing."""
        return self._memory is not None

    def new(self):
        """Returns tensors like the weights; on the host the same ones each time."""
        if self._memory is None:
            return [torch.empty_like(w) for w in self.weights]
        return self._memory.like(self.weights)

    def widen(self, tensors):
        """Returns the tensors in float32."""
        if not any_low_precision(tensors):
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
        # For small ones it is the calls that cost, not fresh memory.
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
        # PyTorch refuses a number that is 0 in float32 and not in float64.
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

    def descend_with_rates(self, d, m, momentum, rates, nesterov=False):
        """Does `m = momentum * m + rate * d`, `w = w - m`.

        Args:
            d: List of tensors.
            m: List of tensors.
            momentum: Float.
            rates: Float32 tensor, a rate for each of them.
            nesterov: Bool. Whether to do `w = w - (momentum * m + rate * d)`.
        """
        in_dampening = {}
        if self.is_on_host and momentum and not nesterov:
            # A call takes as long as the product with a tensor of this size.
            large = (i for i, w in enumerate(self.weights) if w.numel() > 2**15)
            values = rates.tolist()
            in_dampening = {i: values[i] for i in large if values[i] >= SMALLEST_RATE}
        factors = [
            None if i in in_dampening else rate for i, rate in enumerate(rates.unbind())
        ]
        d = self.multiply_each(d, factors)
        triples = list(zip(self.weights, d, m, strict=True))
        for i, rate in in_dampening.items():
            w_i, d_i, m_i = ([tensor] for tensor in triples[i])
            _sgd(w_i, d_i, m_i, None, 1.0, momentum, dampening=1.0 - rate)
        rest = [triple for i, triple in enumerate(triples) if i not in in_dampening]
        if rest:
            w, d, m = zip(*rest, strict=True)
            _sgd(w, d, m, self._found_inf, 1.0, momentum, nesterov)

    def ascend_with_momentum(self, d, m, momentum, rate=1.0, nesterov=False):
        """Does `m = momentum * m - rate * d`, `w = w + m`; `rate` is a float.

        If `nesterov`, `rate` is 1 and it is `w = w + momentum * m - d`.
        """
        _sgd(
            self.weights,
            d,
            m,
            self._found_inf,
            lr=-1.0,
            momentum=momentum,
            nesterov=nesterov,
            dampening=1.0 - rate,
            maximize=True,
        )

    def decay(self, decay):
        """Does `w = w - decay * w`, if `decay` is not None."""
        if decay is not None:
            # The kernel reads an element before it writes it.
            self.descend(self.weights, decay)

    def adam(self, rule, grads, momenta, velocities, scale=None):
        """Does the step of `rules.Adam`, whose `alpha` holds the bias correction.

        Args:
            rule: `rules.Adam`.
            grads: List of float32 tensors.
            momenta: List of tensors.
            velocities: List of tensors.
            scale: Scalar tensor by which the kernel divides the gradients, in place:
                they are the step's own copies. Defaults to `None`: nothing.
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

    def assign(self, slots, values):
        """Copies values into slots; on an accelerator not where there is an overflow.

        The values are memory of the step's own, which may be written.
        """
        if self._found_inf is None:
            torch._foreach_copy_(slots, values)
        else:
            copy_unless(self._found_inf, slots, values)


def moving_averages(slots, values, beta):
    """Returns `beta * slot + (1 - beta) * value`, rounded as Keras does on PyTorch."""
    averages = torch._foreach_mul(slots, beta)
    torch._foreach_add_(averages, values, alpha=1 - beta)
    return averages


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
    # The first step sets `m = d`, as a momentum of 0 does at every step.
    is_first_step = bool(m) and not momentum
    torch._fused_sgd_(
        w,
        d,
        m,
        lr=lr,
        # To the kernel a momentum of 0 means that there is no slot.
        momentum=1.0 if is_first_step else momentum,
        nesterov=nesterov and not is_first_step,
        weight_decay=0.0,
        dampening=dampening,
        maximize=maximize,
        is_first_step=is_first_step,
        found_inf=found_inf,
    )


def copy_unless(found_inf, targets, sources):
    """Copies contiguous tensors, and writes nothing where `found_inf` is 1.0.

    That is the first step of the fused SGD kernel, which sets the momentum. To the
    sources, its variables and gradients, it does nothing at a rate of 0.
    """
    torch._fused_sgd_(
        sources,
        sources,
        targets,
        lr=0.0,
        momentum=1.0,
        nesterov=False,
        weight_decay=0.0,
        dampening=0.0,
        maximize=False,
        is_first_step=True,
        found_inf=found_inf,
    )
    # The kernel does not increment it, and others rely on it: autograd, and the masters
    # that another optimizer has of the same variables.
    for target in targets:
        torch.autograd.graph.increment_version(target)
