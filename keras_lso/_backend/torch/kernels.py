"""PyTorch's own fused kernels of SGD and Adam, and the memory of a step on the host.

The kernels can unscale gradients, but overwrite them. So the scale becomes a part of a
coefficient of the kernel if there is one, or gradients are unscaled into own memory.
"""

import contextlib

import torch
from torch._utils import _unflatten_dense_tensors

from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.measure import SMALL, dtype_of, operands
from keras_lso._backend.torch.no_sync import NumbersOnDevice

# The devices that have the kernels.
DEVICES = ("cpu", "cuda")

# Subtracted from 1 in float64, a smaller rate would lose digits of a float32.
SMALLEST_RATE = 2.0**-29
# At this step number, Adam's bias correction is 1 for any beta below 1.
_LAST_STEP = 2.0**100
# The float16 elements in a cache line, which holds fewer elements of a wider dtype.
_LINE = 32


class Memory:
    """A buffer for all chunks: new memory costs more than the arithmetic on it."""

    # A chunk takes the middle of the buffer. Each thread takes a part of a tensor, so
    # each of two threads writes the same cache lines for a large tensor as for a small
    # one. If their cores share no cache, a line that another core has written takes
    # longer to access than main memory.

    def __init__(self, like: torch.Tensor, size: int):
        # The buffer may be kept, and a tensor from inference mode must not be written
        # outside that mode.
        with torch.inference_mode(False):
            self._flat = like.new_empty(size, dtype=torch.float32)

    def flat(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a part of the buffer with a chunk's number of elements."""
        # A view by dtype that is taken in inference mode must not be written outside.
        flat = self._flat if dtype == torch.float32 else self._flat.view(dtype)
        start = (flat.numel() - size) // 2
        start -= start % _LINE
        return flat[start : start + size]

    def like(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of the buffer with the shapes of a chunk's tensors."""
        flat = self.flat(sum(map(torch.Tensor.numel, tensors)))
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return [flat.view(tensors[0].shape)]
        return _unflatten_dense_tensors(flat, tensors)


class Pass:
    """What the chunks of an update have in common."""

    def __init__(self, framework, targets, factor, flag, memory):
        # On an accelerator there is no `Memory`, since the allocator reuses memory. On
        # the host there is no flag: no skipped step comes here.
        self.framework, self.factor, self.flag = framework, factor, flag
        self.memory, self.is_on_host = memory, memory is not None
        # 1.0 where nothing may be written.
        self.found_inf = None if flag is None else torch.logical_not(flag).float()
        iterations = targets.iterations
        self.iterations = None if iterations is None else iterations.value
        self.are_private = targets.are_private
        self._owns_gradients = targets.owns_gradients

    def without_host(self):
        """Returns a context in which formulas copy no number to the device."""
        return contextlib.nullcontext() if self.is_on_host else NumbersOnDevice()

    def are_wide(self, grads):
        """Whether all gradients are in float32."""
        return set(map(dtype_of, grads)) == {torch.float32}

    def scaled(self, grads, factor):
        """Returns the products of gradients and a factor, in float32."""
        is_one = isinstance(factor, float) and factor == 1.0
        if not self.are_wide(grads):
            wide = self._new(grads)
            torch._foreach_copy_(wide, grads)
            if not is_one and self.memory is None:
                torch._foreach_mul_(wide, operands(factor, wide))
            elif not is_one:
                self.memory.flat(sum(map(torch.Tensor.numel, wide))).mul_(factor)
            return wide
        if is_one:
            return grads
        # For small tensors the calls cost more than new memory.
        if not self.is_on_host or max(map(torch.Tensor.numel, grads)) <= SMALL:
            return list(torch._foreach_mul(grads, operands(factor, grads)))
        pairs = zip(grads, self._new(grads), strict=True)
        return [torch.mul(g, factor, out=out) for g, out in pairs]

    def _new(self, grads):
        if self.memory is None:
            return [torch.empty_like(g, dtype=torch.float32) for g in grads]
        return self.memory.like(grads)

    def scaled_in_kernel(self, grads, factor):
        """Returns float32 gradients, and the divisor for the fused kernel, or None."""
        # The quotients equal the products of `scaled`. The kernel writes them into the
        # gradients, so these must be the step's own, or copies. Without a divisor they
        # are multiplied here.
        are_wide = self.are_wide(grads)
        writes = self._owns_gradients or not (self.is_on_host or are_wide)
        if not writes or not torch.is_tensor(factor):
            return self.scaled(grads, factor), None
        return self.scaled(grads, 1.0), torch.reciprocal(factor)

    def decay(self, weights, decay):
        """Does `w = w - decay * w`, if `decay` is not None."""
        if decay is not None:
            # The kernel reads an element before it writes it.
            fused_sgd(weights, weights, [], self.found_inf, lr=decay)


def fused_sgd(
    w,
    d,
    m,
    found_inf,
    lr,
    momentum=0.0,
    nesterov=False,
    dampening=0.0,
    maximize=False,
    scale=None,
):
    """Does `m = momentum * m + (1 - dampening) * d`, `w = w - lr * m`."""
    # With `maximize`, `-d` replaces `d`. With `scale`, a scalar tensor, `d` is divided
    # by it, in place.
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


def fused_adam(rule, w, g, m, v, found_inf, scale=None):
    """Makes the step of Adam's rule, whose `alpha` includes the bias correction."""
    step = w[0].new_full((), _LAST_STEP)
    torch._fused_adam_(
        w,
        g,
        m,
        v,
        [],
        [step] * len(g),
        lr=rule.alpha,
        beta1=rule.beta_1,
        beta2=rule.beta_2,
        weight_decay=0.0,
        eps=rule.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=found_inf,
    )


def add_multiple(targets, values, alpha):
    """Does `w = w + alpha * d`; the fused kernel of the host rounds alike."""
    if torch_measure.is_on_host(targets[0]):
        fused_sgd(targets, values, [], None, lr=-alpha)
    else:
        torch._foreach_add_(targets, values, alpha=alpha)


def can_copy_unless(target):
    """Whether `copy_unless` takes this tensor, or shard: not under `torch.compile`."""
    return (
        target.is_floating_point()
        and target.is_contiguous()
        and target.device.type in DEVICES
        and not torch.compiler.is_compiling()
    )


def copy_unless(found_inf, targets, sources):
    """Copies contiguous tensors of a dtype, or nothing where `found_inf` is 1.0."""
    # The targets serve as the momenta of the fused SGD kernel, which sets them to the
    # gradients. The sources serve as its gradients, and also as its variables, which a
    # rate of 0 leaves as they are.
    fused_sgd(sources, sources, targets, found_inf, lr=0.0, momentum=0.0)
    # The kernel does not increment the version. Autograd relies on it, and so do the
    # masters of the same variables in another optimizer.
    torch.autograd.graph.increment_version(targets)
