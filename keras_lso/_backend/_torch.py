"""The primitives on PyTorch: eager, in place."""

import contextlib

import keras
import torch
from torch.utils import _pytree

from keras_lso._backend import (
    _torch_measure,
    _torch_numbers,
    _torch_plan,
    _torch_processes,
    _torch_scalars,
    _torch_shard_checks,
    _torch_shards,
    _torch_steps,
    _torch_undo,
    autodiff,
)
from keras_lso._backend.framework import Framework
from keras_lso._backend.tensors import FLOAT16_MAX, as_real


class Torch(Framework):
    scalars = _torch_scalars.TorchScalars()
    UPDATES_IN_PLACE = True
    COMPILES_LOOPS = False
    AVERAGES_IN_STEP = True
    OTHER_STEP = "its own step, left out or, on an accelerator, undone"
    PACKAGES = ("torch", "triton")
    HOW_TO_START = _torch_processes.HOW_TO_START

    circumstances = staticmethod(_torch_plan.circumstances)
    signature_of = staticmethod(_torch_plan.signature_of)
    plan_step = staticmethod(_torch_plan.StepPlan)
    measure = staticmethod(_torch_measure.measure)
    clipped = staticmethod(_torch_measure.clipped)
    l2_norms = staticmethod(_torch_measure.l2_norms)
    fused_step_takes = staticmethod(_torch_steps.fused_step_takes)
    fused_step = _torch_steps.fused_step
    run_masked = staticmethod(_torch_steps.run_masked)
    clear = staticmethod(_torch_steps.clear)
    copies_of = staticmethod(_torch_undo.copies_of)
    restore = staticmethod(_torch_undo.restore)
    any_sharded = staticmethod(_torch_shards.any_sharded)
    sharded_like = staticmethod(_torch_shards.sharded_like)
    check_shards = staticmethod(_torch_shard_checks.check_shards)
    scalar = staticmethod(_torch_scalars.scalar)
    without_host = staticmethod(_torch_numbers.without_host)
    count_processes = staticmethod(_torch_processes.count_processes)
    average_over_processes = _torch_processes.average_over_processes

    def run_if(self, finite, step, grads, state):
        if not _torch_measure.is_on_host(finite):
            _torch_undo.run_or_undo(finite, step, grads, state)
        elif finite:
            step(grads)

    def rounded(self, master, dtype):
        """Without Keras's `clip`, which copies its limits to the device."""
        dtype = getattr(torch, keras.backend.standardize_dtype(dtype))
        if dtype == torch.float16:
            master = master.clamp(-FLOAT16_MAX, FLOAT16_MAX)
        return master.to(dtype)

    def as_gradient(self, value):
        """With a faster test, which nearly all gradients pass."""
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
        return as_real(value, self.map_values)

    def to_dense(self, grad):
        """Keras has no sparse gradients on PyTorch."""
        return grad

    def compute_gradients(self, loss_fn, variables, grad_loss=None, tape=None):
        autodiff.refuse_tape(tape)
        known = () if callable(variables) else [v.value for v in variables]
        with torch.enable_grad(), _requiring_grad(known):
            loss = torch.as_tensor(loss_fn())
            if callable(variables):
                variables = variables()
            return loss, _gradients(loss, variables, grad_loss)

    def differentiate(self, loss, variables, transform, grad_loss=None, tape=None):
        autodiff.refuse_tape(tape)
        with torch.enable_grad():
            return _gradients(transform(loss), variables, grad_loss)

    def random_state_kept(self):
        """Dropout without a seed takes its numbers from PyTorch's own generators."""
        return torch.random.fork_rng(range(torch.cuda.device_count()))

    def has_values(self, value):
        try:
            value.data_ptr()
        except RuntimeError:  # Inside of `torch.vmap`.
            return False
        return value.device.type != "meta"

    @torch.no_grad()
    def trained_variables(self, loss_fn):
        return autodiff.trained_variables(loss_fn)

    def with_positions(self, items):
        return [(_pytree.SequenceKey(i), item) for i, item in enumerate(items)]

    def devices(self):
        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        return list(names) or ["cpu"]


def _gradients(loss, variables, grad_loss):
    values = [v.value for v in variables]
    # Autograd refuses tensors that do not require a gradient.
    followed = [v for v in values if v.requires_grad]
    if not loss.requires_grad or not followed:
        return [None] * len(variables)
    weights = autodiff.weights_of(loss, grad_loss)
    grads = iter(torch.autograd.grad(loss, followed, weights, allow_unused=True))
    return [next(grads) if v.requires_grad else None for v in values]


@contextlib.contextmanager
def _requiring_grad(tensors):
    """Lets autograd follow variables that are not trainable as well."""
    frozen = [t for t in tensors if not t.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)
