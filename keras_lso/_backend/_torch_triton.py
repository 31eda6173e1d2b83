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
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from keras_lso._backend import layer_rules, rules
from keras_lso._backend._torch_addresses import Group
from keras_lso._backend.kernel_choice import KERNELS

# Where Triton's kernels run.
DEVICES = ("cuda",)


def import_kernels():
    """Returns what the modules of the kernels hold, by its names.

    Raises:
        ImportError: If Triton is not installed.
    """
    try:
        modules = [
            importlib.import_module(f"keras_lso._backend.{name}")
            for name in ("_triton_kernels", "_triton_layer_kernels")
        ]
        return SimpleNamespace(**{k: v for m in modules for k, v in vars(m).items()})
    except ImportError as error:
        raise ImportError(
            "KERAS_LSO_KERNELS='triton' needs Triton, which PyTorch's builds for CUDA "
            "install on Linux: `pip install triton`, or leave the variable out. "
            f"It was not imported: {error}"
        ) from error


# None unless they are asked for: `step` is not to be called then.
kernels: Any = import_kernels() if KERNELS == "triton" else None


# --- The rules ----------------------------------------------------------------------


class TritonStep(NamedTuple):
    """How a rule's kernel is called.

    Attributes:
        kernel: String, its name in `_triton_kernels.py`.
        coefficients: Callable of the rule that returns a dict of its arguments.
        options: Tuple of names of what decides how it is compiled.
        takes: Callable of the rule, whether the kernel implements it.
        measure: Callable that returns a dict of arguments which depend on the tensors,
            from `(rule, launch, tables, arguments, found)`. None if there are none.
    """

    kernel: str
    coefficients: Callable
    options: tuple[str, ...] = ()
    takes: Callable = lambda rule: True
    measure: Callable | None = None


def _of_keras(rule):
    """Returns the arguments of all formulas of Keras."""
    return {"decay": rule.decay, "learning_rate": rule.learning_rate}


def _of_adam(rule):
    return {
        "decay": rule.decay,
        "alpha": rule.alpha,
        # Subtracted in float64: in float32 it would be another number.
        "rate_1": 1 - rule.beta_1,
        "rate_2": 1 - rule.beta_2,
        "epsilon": rule.epsilon,
    }


def _of_lars(rule):
    return {"momentum": rule.momentum, "weight_decay": rule.weight_decay or None}


def _measure_lars(rule, launch, tables, arguments, found):
    """Returns the learning rates of the tensors, of norms that the device computes."""
    columns, group = launch.columns, launch.group
    if rule.trust_ratio is None:
        return {"rates": rule.learning_rate.repeat(group.count)}
    if found.rule_norms is not None:
        # Of the whole tensors, if these are shards.
        pairs = zip(*(found.rule_norms[i] for i in columns), strict=True)
        return {"rates": rule.rate(tuple(map(torch.stack, pairs)))}
    squares = arguments["found_inf"].new_empty(2 * group.blocks)
    norms = squares.new_empty(2, group.count)
    shared = {name: arguments[name] for name in ("found_inf", "inv_scale")}
    # The paper's ratio is of the gradient without its penalty.
    penalty = None if rule.is_paper else arguments["weight_decay"]
    own = {"squares": squares, "weight_decay": penalty, **shared}
    _launch(kernels.lars_squares, launch, tables, own)
    kernels.lars_norms[(group.count,)](
        tables[0],
        group.count,
        group.blocks,
        squares,
        norms,
        SUMMED=kernels.SUMMED,
        N=kernels.BLOCK,
        num_warps=kernels.WARPS,
        enable_fp_fusion=False,
    )
    return {"rates": rule.rate(tuple(norms.unbind()))}


TRITON_STEPS = {
    rules.SGD: TritonStep("sgd", _of_keras),
    rules.Momentum: TritonStep(
        "momentum",
        lambda rule: {**_of_keras(rule), "momentum": rule.momentum},
        ("nesterov",),
    ),
    rules.Adam: TritonStep("adam", _of_adam),
    layer_rules.LARS: TritonStep(
        "lars",
        _of_lars,
        ("nesterov",),
        lambda rule: rule.classic_momentum,
        _measure_lars,
    ),
}


def step(plan, chunk, rule, grads, inv_scale, found, found_inf):
    """Steps a chunk of a plan in one pass, its masters included, if a kernel can.

    Args:
        plan: `StepPlan`, with which is kept what the device knows of the tensors.
        chunk: `Chunk` of it.
        rule: The chunk's rule.
        grads: List of its gradients, contiguous tensors.
        inv_scale: Float or scalar tensor, by which they are multiplied.
        found: `Measurement` of the gradients.
        found_inf: Float32 scalar tensor. If it is 1.0 nothing is written. None if the
            step is applied.

    Returns:
        Whether it did. If not, nothing was changed.
    """
    how, device = TRITON_STEPS.get(type(rule)), grads[0].device
    if device.type not in DEVICES or how is None or not how.takes(rule):
        return False
    arguments = _arguments(rule, inv_scale, found_inf, device)
    launches = _launches(plan, chunk, grads)
    if arguments is None or launches is None:
        return False
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        tables = [
            launch.group.on_device([grads[i] for i in launch.columns])
            for launch in launches
        ]
        if None in tables:
            return False
        kernel = getattr(kernels, how.kernel)
        for launch, table in zip(launches, tables, strict=True):
            if not launch.group.blocks:
                continue
            own = {}
            if how.measure is not None:
                own = how.measure(rule, launch, table, arguments, found)
            _launch(kernel, launch, table, arguments | own)
            # As PyTorch's kernels do. Autograd relies on it, and `_torch_in_step.py`.
            torch.autograd.graph.increment_version(launch.group.written)
    return True


def _arguments(rule, inv_scale, found_inf, device):
    """Returns a kernel's arguments that are of no tensor in particular, a dict.

    None if one is a tensor that the kernel cannot read.
    """
    how = TRITON_STEPS[type(rule)]
    given = {
        "found_inf": 0.0 if found_inf is None else found_inf,
        "inv_scale": inv_scale,
        **how.coefficients(rule),
    }
    for name, number in given.items():
        if number is None:
            continue
        is_tensor = torch.is_tensor(number)
        if is_tensor and (
            name not in _POINTERS
            or number.dtype != torch.float32
            or number.device != device
            or number.numel() != 1
        ):
            return None
        if not is_tensor:
            number = float(number)
            if name in _POINTERS:
                number = torch.full((), number, dtype=torch.float32, device=device)
        given[name] = number
    return given | {name.upper(): bool(getattr(rule, name)) for name in how.options}


# What the kernels read from the device. All else are numbers on the host.
_POINTERS = {"found_inf", "inv_scale", "learning_rate", "alpha", "decay"}


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


def _launches(plan, chunk, grads):
    """Returns the launches of a chunk of a plan; None if no kernel takes its tensors.

    They are decided anew if the gradients are of other dtypes.
    """
    dtypes = [g.dtype for g in grads]
    key = chunk.positions[0]
    known, launches = plan.launches.get(key, (None, None))
    if known != dtypes:
        launches = _decide_launches(chunk, grads)
        plan.launches[key] = dtypes, launches
    return launches


def _decide_launches(chunk, grads):
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
