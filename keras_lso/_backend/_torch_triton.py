"""Steps in one pass on a GPU, by the kernels of `_triton_kernels.py`: not by default.

PyTorch's own kernels pass over memory several times: one unscales, one decays, one
steps, and three round masters. One that does it all is asked for by
`KERAS_LSO_KERNELS=triton`; nothing else imports Triton.

A chunk of a `StepPlan` is one launch, if its gradients are of one dtype. Where no
kernel takes a chunk, `step` says so, and `_torch_steps.py` goes on with PyTorch's.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from keras_lso._backend import rules
from keras_lso._backend._torch_addresses import Group
from keras_lso._backend.kernel_choice import KERNELS

# Where Triton's kernels run.
DEVICES = ("cuda",)


def import_kernels():
    """Returns the module of the kernels.

    Raises:
        ImportError: If Triton is not installed.
    """
    try:
        return importlib.import_module("keras_lso._backend._triton_kernels")
    except ImportError as error:
        raise ImportError(
            "KERAS_LSO_KERNELS='triton' needs Triton, which PyTorch's builds for CUDA "
            "install on Linux: `pip install triton`, or leave the variable out. "
            f"It was not imported: {error}"
        ) from error


kernels: Any = import_kernels() if KERNELS == "triton" else None


# --- The rules ----------------------------------------------------------------------


class TritonStep(NamedTuple):
    """How a rule's kernel is called.

    Attributes:
        kernel: String, its name in `_triton_kernels.py`.
        coefficients: Callable of the rule that returns a dict of its arguments.
        options: Tuple of names of what decides how it is compiled.
    """

    kernel: str
    coefficients: Callable
    options: tuple[str, ...] = ()


TRITON_STEPS = {
    rules.SGD: TritonStep("sgd", lambda rule: {"learning_rate": rule.learning_rate}),
    rules.Momentum: TritonStep(
        "momentum",
        lambda rule: {"learning_rate": rule.learning_rate, "momentum": rule.momentum},
        ("nesterov",),
    ),
    rules.Adam: TritonStep(
        "adam",
        lambda rule: {
            "alpha": rule.alpha,
            # Of the float64: in float32 it would be another number.
            "rate_1": 1 - rule.beta_1,
            "rate_2": 1 - rule.beta_2,
            "epsilon": rule.epsilon,
        },
    ),
}


def step(plan, chunk, rule, grads, inv_scale, found_inf):
    """Steps a chunk of a plan in one pass, its masters included, if a kernel can.

    Args:
        plan: `StepPlan`, with which is kept what the device knows of the tensors.
        chunk: `Chunk` of it.
        rule: The chunk's rule.
        grads: List of its gradients, contiguous tensors.
        inv_scale: Float or scalar tensor, by which they are multiplied.
        found_inf: Float32 scalar tensor. If it is 1.0 nothing is written. None if the
            step is applied.

    Returns:
        Whether it did. If not, nothing was changed.
    """
    device = grads[0].device
    if kernels is None or device.type not in DEVICES or type(rule) not in TRITON_STEPS:
        return False
    arguments = _arguments(rule, inv_scale, found_inf, device)
    launches = plan.launches.get(chunk.positions[0])
    if launches is None:
        launches = _launches(chunk, grads)
        plan.launches[chunk.positions[0]] = launches
    if arguments is None or launches is None:
        return False
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        tables = [
            launch.group.on_device([grads[i] for i in launch.columns])
            for launch in launches
        ]
        if None in tables:
            return False
        kernel = getattr(kernels, TRITON_STEPS[type(rule)].kernel)
        for launch, table in zip(launches, tables, strict=True):
            if launch.group.blocks:
                _launch(kernel, launch, table, arguments)
    return True


def _arguments(rule, inv_scale, found_inf, device):
    """Returns a kernel's arguments that are of no tensor in particular, a dict.

    None if one is a tensor that the kernel cannot read.
    """
    how = TRITON_STEPS[type(rule)]
    if found_inf is None:
        found_inf = torch.zeros((), device=device)
    numbers = {
        "found_inf": found_inf,
        "inv_scale": inv_scale,
        "decay": rule.decay,
        **how.coefficients(rule),
    }
    for name, number in numbers.items():
        if torch.is_tensor(number):
            is_float32 = number.dtype == torch.float32 and number.numel() == 1
            if not is_float32 or number.device != device:
                return None
        elif number is not None:
            numbers[name] = float(number)
    return numbers | {name.upper(): bool(getattr(rule, name)) for name in how.options}


class Launch(NamedTuple):
    """Tensors of a chunk that one launch steps: those with gradients of one dtype.

    Attributes:
        columns: List of ints, where they stand in the chunk.
        group: `Group` of them.
        dtypes: Dict of what a kernel is compiled for, the gradients' dtype and that of
            the low-precision variables, or None.
    """

    columns: list[int]
    group: Group
    dtypes: dict[str, Any]


def _launches(chunk, grads):
    """Returns the launches of a chunk; None if no kernel takes its tensors."""
    low = [variable for _, variable in chunk.pairs]
    rows = [chunk.variables, *chunk.slots, *([low] if low else [])]
    wide = {t.dtype for row in rows[: 1 + len(chunk.slots)] for t in row}
    if wide != {torch.float32} or not {t.dtype for t in low} <= _LOW:
        return None
    copy = getattr(kernels.tl, _name(low[0].dtype)) if low else None
    launches = []
    for dtype in dict.fromkeys(g.dtype for g in grads):
        columns = [i for i, g in enumerate(grads) if g.dtype == dtype]
        group = Group([[row[i] for i in columns] for row in rows], kernels.BLOCK)
        dtypes = {"GRADIENT": getattr(kernels.tl, _name(dtype)), "COPY": copy}
        launches.append(Launch(columns, group, dtypes))
    return launches


_LOW = {torch.float16, torch.bfloat16}


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _launch(kernel, launch, tables, arguments):
    table, gradients, owners = tables
    kernel[(launch.group.blocks,)](
        table,
        gradients,
        owners,
        launch.group.count,
        **arguments,
        **launch.dtypes,
        N=kernels.BLOCK,
        num_warps=kernels.WARPS,
        # Each operation rounds by itself, as in `rules.py`.
        enable_fp_fusion=False,
    )
    # As PyTorch's kernels do. Autograd relies on it, and `_torch_in_step.py`.
    torch.autograd.graph.increment_version(launch.group.written)
