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
_RMSPROP = partial(
    torch.optim.RMSprop,
    lr=hyper.ADAM_RATE,
    alpha=hyper.RMSPROP_RHO,
    eps=hyper.EPSILON,
)
_MOMENTUM = {"lr": hyper.SGD_RATE, "momentum": hyper.MOMENTUM}
_OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=hyper.SGD_RATE),
    "SGD+momentum": partial(torch.optim.SGD, **_MOMENTUM),
    "Adam": partial(torch.optim.Adam, **_ADAM),
    "AdamW": partial(torch.optim.AdamW, **_ADAM, weight_decay=hyper.WEIGHT_DECAY),
    "RMSprop": _RMSPROP,
    # With Keras's momentum: the published one decays 250 times as slowly.
    "Nadam": partial(torch.optim.NAdam, **_ADAM, momentum_decay=1.0),
    "Adagrad": partial(
        torch.optim.Adagrad,
        lr=hyper.ADAM_RATE,
        eps=hyper.EPSILON,
        initial_accumulator_value=hyper.ADAGRAD_START,
    ),
    "Adadelta": partial(
        torch.optim.Adadelta,
        lr=hyper.ADAM_RATE,
        rho=hyper.ADADELTA_RHO,
        eps=hyper.EPSILON,
    ),
    # PyTorch has no LARS. This is the least that a step with momentum and weight
    # decay can cost. It has no Lion either: RMSprop is its other optimizer with one
    # slot and a learning rate as small.
    "LARS": partial(torch.optim.SGD, **_MOMENTUM, weight_decay=hyper.WEIGHT_DECAY),
    "Lion": _RMSPROP,
}
STAND_INS = {"LARS": "SGD", "Lion": "RMSprop"}
"""Inner optimizers whose peers are of another rule, and its name."""
_FUSED = set(_OPTIMIZERS) - {"RMSprop", "Nadam", "Adagrad", "Adadelta", "Lion"}


def peers(mode, inner, **loop):
    """Returns the peers of an inner optimizer: names, and what makes each `Step`.

    The fastest kernels that PyTorch has for it come last. `loop` holds arguments of
    `_step`.
    """
    if inner not in _OPTIMIZERS:
        return {}
    suffix = f" {STAND_INS[inner]}" if inner in STAND_INS else ""
    kernels = ("foreach", "fused") if inner in _FUSED else ("foreach",)
    return {
        f"GradScaler + {kernel}{suffix}": partial(
            _step, partial(_OPTIMIZERS[inner], **{kernel: True}), **loop
        )
        for kernel in kernels
    }


def _step(make_optimizer, tensors, clip_norm=None, micro_batches=1):
    """Returns the step of a training loop, without the backward pass.

    GradScaler takes float32 gradients only. Who trains float16 weights copies them
    into float32 masters, by hand, and those back.

    Args:
        make_optimizer: Returns an optimizer of a list of parameters.
        tensors: `rows_torch.Tensors`.
        clip_norm: Float or None. What the norm of all gradients is clipped to.
        micro_batches: Int. How many gradients a step adds up. The first are there
            when it begins, as the backward pass writes them; it adds up the others.
            Their mean is left to the loss.
    """
    weights = [torch.nn.Parameter(w) for w in tensors.weights()]
    optimizer = make_optimizer(weights)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=hyper.SCALE)
    # It makes the scale when it scales the first loss.
    scaler.scale(torch.zeros((), device=DEVICE))
    has_masters = tensors.dtype != torch.float32
    if has_masters:
        narrow = [w.detach().to(tensors.dtype) for w in weights]
    gradients = tensors.gradients
    if has_masters or micro_batches > 1:
        gradients = [torch.empty_like(w) for w in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient

    def run():
        if has_masters:
            torch._foreach_copy_(gradients, tensors.gradients)
        for _ in range(micro_batches - 1):
            torch._foreach_add_(gradients, tensors.gradients)
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, clip_norm)
        scaler.step(optimizer)
        scaler.update()
        if has_masters:
            with torch.no_grad():
                torch._foreach_copy_(narrow, weights)

    refresh = tensors.refresh(scaled=True)

    def prepare():
        refresh()
        if micro_batches > 1:
            torch._foreach_copy_(gradients, tensors.gradients)

    def state():
        slots = [t for slot in optimizer.state.values() for t in slot.values()]
        slots = [to_numpy(t) for t in slots if torch.is_tensor(t)]
        return [to_numpy(w) for w in weights], slots

    return Step(run, state, prepare=prepare)
