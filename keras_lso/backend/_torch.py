"""The primitives on PyTorch: eager, in place."""

import torch

from keras_lso.backend import generic
from keras_lso.backend.generic import Measurement, fused_step

__all__ = [
    "compute_gradients",
    "fused_step",
    "fused_step_takes",
    "map_values",
    "measure",
    "run_if",
]


@torch.no_grad()
def measure(grads, norms=False, amax=False, inv_scale=1.0):
    """See `generic.measure`.

    A finite norm proves finite elements, and one multi-tensor norm costs a
    tenth of `isfinite` over all tensors. A norm that is not finite proves
    nothing (1e20 squared is inf), nor does any if unscaling makes the gradients
    larger: only then every element is looked at.
    """
    values = [_values(g) for g in grads]
    # A norm may accumulate in a wider type than its tensor's, never a narrower one.
    is_double = any(v.dtype == torch.float64 for v in values)
    wide = torch.float64 if is_double else torch.float32
    norm_list = torch._foreach_norm(values, 2, dtype=wide)
    finite = torch.stack(norm_list).isfinite().all()
    if not finite & (inv_scale <= 1):
        finite = _all_finite(values, inv_scale)
    return Measurement(
        finite,
        [n.float() for n in norm_list] if norms else None,
        generic.largest_magnitude(values) if amax else None,
    )


def _all_finite(values, inv_scale):
    values = [generic.in_float32(v) for v in values]
    return torch.stack([(v * inv_scale).isfinite().all() for v in values]).all()


def run_if(finite, step, grads, state):
    """See `generic.run_if`."""
    if finite:
        step(grads)


def fused_step_takes(rule, variables, gradients):
    """PyTorch's fused kernels are still to come."""
    return False


def compute_gradients(loss_fn, variables):
    """See `generic.compute_gradients`."""
    loss = loss_fn()
    return loss, torch.autograd.grad(
        loss, [v.value for v in variables], allow_unused=True
    )


def map_values(fn, grad):
    """See `generic.map_values`."""
    return fn(grad)


def _values(grad):
    return grad.detach()
