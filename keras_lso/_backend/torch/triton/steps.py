"""Steps in one pass on a GPU, by the kernels of `kernels.py`.

PyTorch's own kernels pass over memory several times: one unscales, one decays, one
steps, and three round masters. The Triton kernels of this package do it in one pass.
Triton is imported in the first step with tensors on a GPU if `KERAS_LSO_KERNELS` is
`auto`, and with this file if it is `triton`.

`decide` finds out which `Chunks` the Triton kernels take. A kernel must have passed a
trial (`trial.py`). A chunk takes one launch for each dtype of its gradients. If no
kernel takes a chunk, `step` returns False, and `../steps.py` uses PyTorch's kernels.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from keras_lso._backend import kernel_choice
from keras_lso._backend.masters import KINDS
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.torch.scalars import TorchScalars
from keras_lso._backend.torch.triton import trial as torch_triton_trial
from keras_lso._backend.torch.triton.addresses import Group

_SCALARS = TorchScalars()
# The devices on which the Triton kernels run.
DEVICES = ("cuda",)


@functools.cache
def kernels():
    """Returns the module of the kernels; None if these kernels are not to be used.

    Raises:
        ImportError: If `KERAS_LSO_KERNELS=triton` requires them and Triton is missing.
    """
    if kernel_choice.KERNELS not in ("triton", "auto"):
        return None
    try:
        return import_kernels()
    except Exception as error:
        if kernel_choice.KERNELS == "triton":
            raise ImportError(
                "KERAS_LSO_KERNELS='triton' needs Triton, which PyTorch's builds for "
                "CUDA install on Linux: `pip install triton`, or leave the variable "
                f"out. It was not imported: {error}"
            ) from error
        if getattr(error, "name", None) != "triton":
            # Triton is installed, but is too old or broken.
            warnings.warn(
                "Triton could not be imported, or is no Triton that keras_lso knows: "
                "PyTorch's own kernels step in place of ours. "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        return None


def import_kernels():
    """Returns the module of the kernels, which needs Triton."""
    return importlib.import_module("keras_lso._backend.torch.triton.kernels")


if kernel_choice.KERNELS == "triton":
    # Reports a missing Triton at once.
    kernels()


# --- The rules ----------------------------------------------------------------------


class TritonStep(NamedTuple):
    """The call of a rule's kernel.

    Attributes:
        kernel: String, its name in `kernels.py`.
        coefficients: Callable that takes the rule and returns a dict of arguments.
        form: Callable that takes the rule. Its result decides which kernels are
            launched and how they are compiled, and is compared at each step.
        options: Tuple of the names of boolean options that are compiled into the
            kernel.
        takes: Callable that takes the rule and returns whether the kernel implements
            it.
        measure: Callable `(rule, launch, tables, arguments, found)` that returns a dict
            of the arguments that depend on the tensors. None if there are none.
    """

    kernel: str
    coefficients: Callable
    form: Callable
    options: tuple[str, ...] = ()
    takes: Callable = lambda rule: True
    measure: Callable | None = None


def _of_keras(rule):
    """Returns the arguments that the formulas of Keras's SGD share."""
    return {"decay": rule.decay, "learning_rate": rule.learning_rate}


def _of_adam(rule):
    return {
        "decay": rule.decay,
        "alpha": rule.alpha,
        # Subtracted in float64. In float32 the result would differ.
        "rate_1": 1 - rule.beta_1,
        "rate_2": 1 - rule.beta_2,
        "epsilon": rule.epsilon,
    }


def _of_lars(rule):
    return {"momentum": rule.momentum, "weight_decay": rule.weight_decay or None}


def _form_of_lars(rule):
    return (
        rule.weight_decay == 0,
        rule.nesterov,
        rule.trust_ratio,
        rule.classic_momentum,
    )


def _measure_lars(rule, launch, tables, arguments, found):
    """Returns the learning rates of the tensors, from norms computed on the device."""
    columns, group = launch.columns, launch.group
    if rule.trust_ratio is None:
        return {"rates": rule.learning_rate.repeat(group.count)}
    if found.rule_norms is not None:
        # The norms of the whole tensors, if these are shards.
        pairs = zip(*(found.rule_norms[i] for i in columns), strict=True)
        return {"rates": rule.rate(tuple(map(torch.stack, pairs)), _SCALARS)}
    squares = arguments["found_inf"].new_empty(2 * group.blocks)
    norms = squares.new_empty(2, group.count)
    shared = {name: arguments[name] for name in ("found_inf", "inv_scale")}
    # The paper's ratio uses the gradient without its penalty.
    penalty = None if rule.is_paper else arguments["weight_decay"]
    own = {"squares": squares, "weight_decay": penalty, **shared}
    _launch(kernels().lars_squares, launch, tables, own)
    kernels().lars_norms[(group.count,)](
        tables[0],
        group.count,
        group.blocks,
        squares,
        norms,
        SUMMED=kernels().SUMMED,
        N=kernels().BLOCK,
        num_warps=kernels().WARPS,
        enable_fp_fusion=False,
    )
    return {"rates": rule.rate(tuple(norms.unbind()), _SCALARS)}


# Keyed by `Rule.kernel`.
TRITON_STEPS = {
    "sgd": TritonStep("sgd", _of_keras, lambda rule: rule.decay is None),
    "momentum": TritonStep(
        "momentum",
        lambda rule: {**_of_keras(rule), "momentum": rule.momentum},
        lambda rule: (rule.decay is None, rule.nesterov),
        ("nesterov",),
    ),
    "adam": TritonStep("adam", _of_adam, lambda rule: rule.decay is None),
    "lars": TritonStep(
        "lars",
        _of_lars,
        _form_of_lars,
        ("nesterov",),
        lambda rule: rule.classic_momentum,
        _measure_lars,
    ),
}


# --- The chunks that our kernels take -----------------------------------------------


class Launch(NamedTuple):
    """The tensors of a chunk with gradients of one dtype, which one launch steps.

    Attributes:
        columns: List of ints, the positions of the tensors in the chunk.
        group: `Group` of the tensors.
        compiled: Dict of the properties that a kernel is compiled for: the dtypes of
            the gradients and of the weights, and the kind of their masters, or None.
        single: List of ints, the columns of the tensors with one element.
    """

    columns: list[int]
    group: Group
    compiled: dict[str, Any]
    single: list[int]


def decide(chunks, rules, grads):
    """Finds out which chunks our kernels take, and tries the untried kernels.

    All trials run before the first chunk is stepped, since a trial may raise an error.
    The results are kept with the chunks as long as the gradients and rules are of the
    same kinds.

    Args:
        chunks: `Chunks`.
        rules: List of the rules of all tensors.
        grads: List of the gradients of all tensors, which are contiguous.
    """
    device = grads[0].device
    if device.type not in DEVICES or kernels() is None:
        return
    for chunk in chunks.items:
        rule = rules[chunk.positions[0]]
        how = TRITON_STEPS.get(rule.kernel)
        if how is None:
            continue
        facts = type(rule), how.form(rule), [grads[i].dtype for i in chunk.positions]
        known, _ = chunks.launches.get(chunk.positions[0], (None, None))
        if known != facts:
            own = [grads[i] for i in chunk.positions]
            with _current(device):
                passed = _passes(chunk, rule, own, device)
            chunks.launches[chunk.positions[0]] = (
                # Not known while a CUDA graph is captured. The next step tries again.
                None if passed is None else facts,
                _launches(chunk, own) if passed else None,
            )


def _passes(chunk, rule, grads, device):
    """Whether our kernels take a chunk and passed; None if that is not yet known."""
    wide = {t.dtype for row in (chunk.numbers or [], *chunk.slots) for t in row}
    takes = TRITON_STEPS[rule.kernel].takes(rule)
    if not takes or not wide <= {torch.float32}:
        return False
    sample = torch_triton_trial.sample_of(rule)
    weight, kind = chunk.variables[0].dtype, name_of_kind(chunk)
    verdicts = [
        torch_triton_trial.passes(
            torch_triton_trial.Variant(sample, dtype, weight, kind),
            device,
            _step_by_itself,
            kernels().BLOCK,
        )
        for dtype in dict.fromkeys(g.dtype for g in grads)
    ]
    return None if None in verdicts else all(verdicts)


def name_of_kind(chunk):
    """Returns the key in `KINDS` of a chunk's masters; None if there are none."""
    return _NAMES[type(chunk.narrow[0].kind)] if chunk.narrow else None


_NAMES = {type(kind): name for name, kind in KINDS.items()}


def _launches(chunk, grads):
    """Returns the launches of a chunk that our kernels take."""
    kept = [n.kept for n in chunk.narrow if n.kept is not None]
    rows = [chunk.variables, *chunk.slots, *([kept] if kept else [])]
    numbers = [] if chunk.draws is None else [chunk.draws.positions, chunk.draws.places]
    weight, kind = _in_triton(chunk.variables[0].dtype), name_of_kind(chunk)
    launches = []
    for dtype in dict.fromkeys(g.dtype for g in grads):
        columns = [i for i, g in enumerate(grads) if g.dtype == dtype]
        own, of_each = (
            [[row[i] for i in columns] for row in t] for t in (rows, numbers)
        )
        group = Group(own, kernels().BLOCK, of_each)
        compiled = {"GRADIENT": _in_triton(dtype), "WEIGHT": weight, "KIND": kind}
        single = [i for i in columns if grads[i].numel() == 1]
        launches.append(Launch(columns, group, compiled, single))
    return launches


def _in_triton(dtype):
    return getattr(kernels().tl, str(dtype).removeprefix("torch."))


# --- The step -----------------------------------------------------------------------


def step(chunks, chunk, rule, grads, inv_scale, found, found_inf, iterations):
    """Steps a chunk and its masters in one pass, if a kernel can.

    Args:
        chunks: `Chunks`, for which `decide` was called in this step.
        chunk: One `Chunk` of these.
        rule: The chunk's rule.
        grads: List of the chunk's gradients, contiguous tensors.
        inv_scale: Float or scalar tensor, by which the gradients are multiplied.
        found: `Measurement` of the gradients.
        found_inf: Float32 scalar tensor. If it is 1.0 nothing is written. None if the
            step is applied.
        iterations: Integer scalar tensor, the number of the step. None if no kind of
            master draws random bits.

    Returns:
        Whether a kernel stepped the chunk. If not, nothing was changed.
    """
    _, launches = chunks.launches.get(chunk.positions[0], (None, None))
    if launches is None:
        return False
    return _step(chunk, launches, rule, grads, inv_scale, found, found_inf, iterations)


def _step_by_itself(chunk, rule, grads, inv_scale, found_inf, iterations):
    """Steps a chunk that belongs to no `Chunks`, such as that of a trial."""
    if kernels().ARE_INTERPRETED and grads[0].device.type != "cpu":
        # The addresses of a GPU's memory are invalid on the host.
        raise RuntimeError("TRITON_INTERPRET=1 runs the kernels on the host.")
    launches, found = _launches(chunk, grads), Measurement(None)
    return _step(chunk, launches, rule, grads, inv_scale, found, found_inf, iterations)


def _step(chunk, launches, rule, grads, inv_scale, found, found_inf, iterations):
    """Steps a chunk by its launches; returns whether it did."""
    how, device = TRITON_STEPS[rule.kernel], grads[0].device
    arguments = _arguments(rule, inv_scale, found_inf, device)
    # A tensor with the negative bit set stores the negated values. `contiguous()` has
    # already resolved it for tensors with more than one element.
    if arguments is None or any(
        grads[i].is_neg() for launch in launches for i in launch.single
    ):
        return False
    number = None if chunk.draws is None else iterations.to(torch.int32)
    with _current(device):
        tables = [
            launch.group.on_device([grads[i] for i in launch.columns])
            for launch in launches
        ]
        if None in tables:
            return False
        kernel = getattr(kernels(), how.kernel)
        for launch, table in zip(launches, tables, strict=True):
            if not launch.group.blocks:
                continue
            own = {"iterations": number}
            if how.measure is not None:
                own |= how.measure(rule, launch, table, arguments, found)
            _launch(kernel, launch, table, arguments | own)
            # Autograd relies on the version, and so does `../in_step.py`.
            torch.autograd.graph.increment_version(launch.group.written)
    return True


def _current(device):
    """Returns a context in which a CUDA device is the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _arguments(rule, inv_scale, found_inf, device):
    """Returns a dict of the arguments that a kernel has for all tensors alike.

    Returns None if one of them is a tensor that the kernel cannot read.
    """
    how = TRITON_STEPS[rule.kernel]
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


# The arguments that kernels read from the device. All others are numbers on the host.
_POINTERS = {"found_inf", "inv_scale", "learning_rate", "alpha", "decay"}


def _launch(kernel, launch, tables, arguments):
    table, gradients, owners = tables
    kernel[(launch.group.blocks,)](
        table,
        gradients,
        owners,
        launch.group.count,
        **arguments,
        **launch.compiled,
        N=kernels().BLOCK,
        num_warps=kernels().WARPS,
        # Each operation rounds on its own, as in the formula.
        enable_fp_fusion=False,
    )
