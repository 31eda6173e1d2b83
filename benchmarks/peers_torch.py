"""What a user of bare PyTorch would run: `torch.amp.GradScaler` and `torch.optim`."""

from functools import partial

import torch

from benchmarks import inner as hyper
from benchmarks.rows_torch import DEVICE, to_numpy
from benchmarks.timing import Step

_ADAM = {
    "lr": hyper.ADAM_RATE,
    "betas": (hyper.BETA_1, hyper.BETA_2),
    "eps": hyper.EPSILON,
}
_MOMENTUM = {"lr": hyper.SGD_RATE, "momentum": hyper.MOMENTUM}
_OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=hyper.SGD_RATE),
    "SGD+momentum": partial(torch.optim.SGD, **_MOMENTUM),
    "Adam": partial(torch.optim.Adam, **_ADAM),
    "AdamW": partial(torch.optim.AdamW, **_ADAM, weight_decay=hyper.WEIGHT_DECAY),
    # PyTorch has no LARS. This is the least that a step with momentum and weight
    # decay can cost.
    "LARS": partial(torch.optim.SGD, **_MOMENTUM, weight_decay=hyper.WEIGHT_DECAY),
}


def peers(mode, inner):
    """Returns the peers of an inner optimizer: names, and what makes each `Step`."""
    if inner not in _OPTIMIZERS:
        return {}
    suffix = " SGD" if inner == "LARS" else ""
    return {
        f"GradScaler + {kernel}{suffix}": partial(
            _step, partial(_OPTIMIZERS[inner], **{kernel: True})
        )
        for kernel in ("foreach", "fused")
    }


def _step(make_optimizer, tensors):
    """Returns the step of a training loop, without the backward pass.

    GradScaler takes float32 gradients only. Who trains float16 weights copies them
    into float32 masters, by hand, and those back.
    """
    weights = [torch.nn.Parameter(w) for w in tensors.weights()]
    optimizer = make_optimizer(weights)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=hyper.SCALE)
    # It makes the scale when it scales the first loss.
    scaler.scale(torch.zeros((), device=DEVICE))
    has_masters = tensors.dtype != torch.float32
    if has_masters:
        narrow = [w.detach().to(tensors.dtype) for w in weights]
        gradients = [torch.empty_like(w) for w in weights]
    else:
        gradients = tensors.gradients
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient

    def run():
        if has_masters:
            torch._foreach_copy_(gradients, tensors.gradients)
        scaler.step(optimizer)
        scaler.update()
        if has_masters:
            with torch.no_grad():
                torch._foreach_copy_(narrow, weights)

    def state():
        slots = [t for slot in optimizer.state.values() for t in slot.values()]
        slots = [to_numpy(t) for t in slots if torch.is_tensor(t)]
        return [to_numpy(w) for w in weights], slots

    return Step(run, state, prepare=tensors.refresh(scaled=True))
