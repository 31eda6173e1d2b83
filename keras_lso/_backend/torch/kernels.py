"""The operations of fused steps on a chunk of tensors: PyTorch's own fused kernels.

Those kernels can unscale gradients, but overwrite the caller's gradients when they do.
Here gradients are only read. The scale becomes a part of a coefficient of the kernel if
there is one. Otherwise the gradients are unscaled into the step's own memory.
"""

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors

from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.measure import SMALL, operands

# The devices that have the kernels.
DEVICES = ("cpu", "cuda")

# Subtracted from 1 in float64, a smaller rate would lose digits of a float32.
SMALLEST_RATE = 2.0**-29
# At this step number, Adam's bias correction is 1 for any beta below 1.
_LAST_STEP = 2.0**100
# The float16 elements in a cache line, which holds fewer elements of a wider dtype.
_LINE = 32


class Memory:
    """A few buffers for all chunks: new memory costs more than the arithmetic on it.

    A chunk takes the middle of a buffer. Each thread takes a part of a tensor, so each
    of two threads writes the same cache lines for a large tensor as for a small one. If
    their cores share no cache, a line that another core has written takes longer to
    access than main memory.

    Args:
        like: A tensor on the host.
        size: The number of elements of the largest chunk.
    """

    def __init__(self, like, size):
        self._like, self._size = like, size
        self._flats = {}

    def like(self, tensors, number=0, dtype=None):
        """Returns views of a buffer with the shapes of a chunk's tensors.

        Args:
            tensors: List of tensors of one dtype.
            number: Int, which of the buffers.
            dtype: `torch.dtype`. Defaults to that of the tensors.
        """
        flat = self.flat(tensors, number, dtype)
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return [flat.view(tensors[0].shape)]
        return _unflatten_dense_tensors(flat, tensors)

    def flat(self, tensors, number=0, dtype=None):
        """Returns the memory of `like` as one flat tensor."""
        if number not in self._flats:
            # The buffer may be kept, and a tensor from inference mode must not be
            # written outside that mode.
            with torch.inference_mode(False):
                self._flats[number] = self._like.new_empty(
                    self._size, dtype=torch.float32
                )
        flat, dtype = self._flats[number], dtype or tensors[0].dtype
        if dtype != flat.dtype:
            flat = flat.view(dtype)
        size = sum(map(torch.Tensor.numel, tensors))
        start = (flat.numel() - size) // 2
        start -= start % _LINE
        return flat[start : start + size]


class Kernel:
    """In-place operations on a chunk of variables.

    Args:
        weights: List of tensors, the chunk's variables.
        are_wide: Bool. Whether the gradients are all in float32.
        memory: `Memory` for intermediate results. None on an accelerator, whose
            allocator reuses memory on its own.
        found_inf: Float32 scalar tensor. If it is 1.0, neither variables nor slots are
            written. None on the host.
        owns_gradients: Bool. Whether the gradients may be written. Defaults to `False`.
    """

    def __init__(self, weights, are_wide, memory, found_inf, owns_gradients=False):
        self.weights, self.are_wide = weights, are_wide
        self._owns_gradients = owns_gradients
        self._memory, self._found_inf = memory, found_inf
        self.is_on_host = memory is not None

    def new(self, number=0):
        """Returns tensors like the weights; on the host, always the same per number."""
        if self._memory is None:
            return [torch.empty_like(w) for w in self.weights]
        return self._memory.like(self.weights, number)

    def widen(self, grads):
        """Returns copies of the gradients in float32."""
        wide = self.new()
        torch._foreach_copy_(wide, grads)
        return wide

    def multiply(self, grads, factor):
        """Returns the products with a number or a scalar tensor, in float32."""
        # A scalar tensor does not widen the product.
        tensors = grads if self.are_wide else self.widen(grads)
        if isinstance(factor, float) and factor == 1.0:
            return tensors
        # For small tensors the calls cost more than new memory.
        if not self.is_on_host or max(map(torch.Tensor.numel, tensors)) <= SMALL:
            return list(torch._foreach_mul(tensors, operands(factor, tensors)))
        return self.multiply_each(tensors, [factor] * len(tensors))

    def multiply_in_kernel(self, grads, factor):
        """Returns float32 gradients, and the divisor for the fused kernel, or None.

        The quotients equal the products of `multiply`. The kernel writes them into the
        gradients, so these must be the step's own, or copies. If the division would not
        save a pass, the gradients are multiplied here, and the divisor is None.
        """
        writes = self._owns_gradients or not (self.is_on_host or self.are_wide)
        if not writes or not torch.is_tensor(factor):
            return self.multiply(grads, factor), None
        return grads if self.are_wide else self.widen(grads), torch.reciprocal(factor)

    def multiply_each(self, tensors, factors):
        """Returns the product of each float32 tensor with its factor, if not None."""
        out = self.new()
        return [
            t if factor is None else torch.mul(t, factor, out=out_i)
            for t, factor, out_i in zip(tensors, factors, out, strict=True)
        ]

    def add(self, tensors, others, alpha):
        """Returns `tensors + alpha * others`; `alpha` is a float."""
        # PyTorch rejects a number that is 0 in float32 but not in float64.
        alpha = float(np.float32(alpha))
        if not self.is_on_host:
            return list(torch._foreach_add(tensors, others, alpha=alpha))
        return [
            torch.add(t, other, alpha=alpha, out=out_i)
            for t, other, out_i in zip(tensors, others, self.new(), strict=True)
        ]

    def descend(self, d, rate=1.0, scale=None):
        """Does `w = w - rate * d`. For `scale` see `multiply_in_kernel`."""
        _sgd(self.weights, d, [], self._found_inf, lr=rate, momentum=0.0, scale=scale)

    def descend_with_momentum(self, d, m, momentum, rate=1.0, nesterov=False):
        """Does `m = momentum * m + d`, `w = w - rate * m`.

        With `nesterov`, `w = w - rate * (momentum * m + d)`.
        """
        _sgd(self.weights, d, m, self._found_inf, rate, momentum, nesterov)

    def descend_with_rates(self, d, m, momentum, rates, nesterov=False):
        """Does `m = momentum * m + rate * d`, `w = w - m`, with a rate for each tensor.

        With `nesterov`, `w = w - (momentum * m + rate * d)`.
        """
        in_dampening = {}
        if self.is_on_host and momentum and not nesterov:
            # Multiplying a tensor of this size takes as long as a call.
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

    def ascend_with_momentum(self, d, m, momentum, rate, nesterov=False, scale=None):
        """Does `m = momentum * m - rate * d`, `w = w + m`; `rate` is a float.

        With `nesterov` and a rate of 1, `w = w + momentum * m - d`. For `scale` see
        `multiply_in_kernel`.
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
            scale=scale,
        )

    def decay(self, decay):
        """Does `w = w - decay * w`, if `decay` is not None."""
        if decay is not None:
            # The kernel reads an element before it writes it.
            w = self.weights
            _sgd(w, w, [], self._found_inf, lr=decay, momentum=0.0)

    def descend_each(self, d, rates):
        """Does `w = w - rate * d`, with a rate for each tensor; may write `d`."""
        if self.is_on_host:
            for w_i, d_i, rate in zip(self.weights, d, rates.tolist(), strict=True):
                w_i.sub_(d_i, alpha=rate)
        else:
            for d_i, rate in zip(d, rates.unbind(), strict=True):
                torch.mul(d_i, rate, out=d_i)
            self.descend(d)

    def adam(
        self,
        rule,
        grads,
        momenta,
        velocities,
        scale=None,
        targets=None,
        rate=None,
        step=None,
    ):
        """Makes the step of Adam's rule, whose `alpha` includes the bias correction.

        Args:
            rule: A rule with Adam's betas and epsilon.
            grads: List of tensors.
            momenta: List of tensors, which are updated.
            velocities: List of tensors, which are updated.
            scale: See `multiply_in_kernel`. Defaults to `None`.
            targets: List of tensors to update. Defaults to the weights.
            rate: Number or scalar tensor. Defaults to the rule's `alpha`.
            step: Scalar tensor, the number of the update, from which the kernel
                corrects the bias. Defaults to `None`: no correction.
        """
        targets = self.weights if targets is None else targets
        if step is None:
            step = targets[0].new_full((), _LAST_STEP)
        torch._fused_adam_(
            targets,
            grads,
            momenta,
            velocities,
            [],
            [step] * len(grads),
            lr=rule.alpha if rate is None else rate,
            beta1=rule.beta_1,
            beta2=rule.beta_2,
            weight_decay=0.0,
            eps=rule.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=self._found_inf,
        )

    def directions_of_lamb(self, rule, grads, momenta, velocities, scale=None):
        """Updates the moments of `LAMBRule`, and returns the directions.

        Adam's kernel does both in one pass: it ascends at a rate of 1 from the decay.
        For `scale` see `multiply_in_kernel`.
        """
        d, decay = self.new(1), rule.weight_decay
        if not decay:
            torch._foreach_zero_(d)
        elif self.is_on_host:
            for w_i, d_i in zip(self.weights, d, strict=True):
                torch.mul(w_i, decay, out=d_i)
        else:
            d = list(torch._foreach_mul(self.weights, decay))
        self.adam(rule, grads, momenta, velocities, scale, d, -1.0, rule.step)
        return d

    def assign(self, slots, values):
        """Copies the step's own values into slots, unless `found_inf` is 1.0."""
        if self._found_inf is None:
            torch._foreach_copy_(slots, values)
        else:
            copy_unless(self._found_inf, slots, values)


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
    scale=None,
):
    """Does `m = momentum * m + (1 - dampening) * d`, `w = w - lr * m`.

    With `maximize`, `-d` replaces `d`. With `scale`, a scalar tensor, `d` is divided by
    it, in place.
    """
    # The first step sets `m = d`, as a momentum of 0 does at every step.
    is_first_step = bool(m) and not momentum
    torch._fused_sgd_(
        w,
        d,
        m,
        lr=lr,
        # The kernel reads a momentum of 0 as "no slot".
        momentum=1.0 if is_first_step else momentum,
        nesterov=nesterov and not is_first_step,
        weight_decay=0.0,
        dampening=dampening,
        maximize=maximize,
        is_first_step=is_first_step,
        grad_scale=scale,
        found_inf=found_inf,
    )


def add_multiple(targets, values, alpha):
    """Does `w = w + alpha * d`; the fused kernel of the host rounds alike."""
    if torch_measure.is_on_host(targets[0]):
        _sgd(targets, values, [], None, lr=-alpha, momentum=0.0)
    else:
        torch._foreach_add_(targets, values, alpha=alpha)


def can_copy_unless(target):
    """Whether `copy_unless` takes this tensor, which may be a shard.

    It does not under `torch.compile`, which has its own kernels.
    """
    return (
        target.is_floating_point()
        and target.is_contiguous()
        and target.device.type in DEVICES
        and not torch.compiler.is_compiling()
    )


def copy_unless(found_inf, targets, sources):
    """Copies contiguous tensors of a dtype, but writes nothing if `found_inf` is 1.0.

    The targets serve as the momenta of the fused SGD kernel, which sets them to the
    gradients. The sources serve as its gradients, and also as its variables, which a
    rate of 0 leaves as they are.
    """
    _sgd(sources, sources, targets, found_inf, lr=0.0, momentum=0.0)
    # The kernel does not increment the version. Autograd relies on it, and so do the
    # masters of the same variables in another optimizer.
    for target in targets:
        torch.autograd.graph.increment_version(target)
