"""The trial of a Triton kernel, before it steps the user's tensors: `passes`.

Whether a kernel is correct depends on the GPU, its driver and the installed Triton. So
each kernel first steps tensors of the trial: once in a process, for each device and for
each variant that Triton compiles separately. The kernel passes if

- its results equal those of the formulas of `rules.py` and `masters.py` on the host,
- a skipped step changes no bit, not even in NaNs and -0.0,
- it writes neither the gradients nor any memory outside the tensors,
- it raises no error.

The trial has a tensor for each way to fill blocks: one element, less than a block, one
block, several blocks with a rest, and several blocks at an address that allows no reads
of 16 bytes at once. For LARS, one more tensor has over a thousand blocks. Some of the
16-bit weights were assigned, and some exceed the largest float16.

The trial reads from the device, and so waits for it. It runs before the first step of a
variant, and never later. A trial does not measure speed. It cannot survive an illegal
memory access, which ends the process.
"""

import contextlib
import dataclasses
import os
import warnings
from typing import Any, NamedTuple

import keras
import torch

from keras_lso._backend import formulas, kernel_choice
from keras_lso._backend.framework import Framework
from keras_lso._backend.masters import KINDS
from keras_lso._backend.rule import Rule, TrustRatio, always
from keras_lso._backend.targets import Narrow
from keras_lso._backend.torch.chunks import Chunk, draws_of


class Reference(Framework):
    """The primitives that the formulas need, on the host."""

    def bitcast(self, values, dtype):
        # The default goes by way of NumPy. PyTorch may warn about that.
        return values.view(getattr(torch, dtype))


_REFERENCE = Reference()
# The tolerance is relative to the largest magnitude in a tensor, or to 1.0 if that is
# larger. A kernel computes in the order of the formula, so most results are equal to
# the bit. But a GPU may round roots and quotients differently from the host, and sums
# the squares for the norms of LARS in its own order. The error is a few roundings of
# 6e-8. A mistake in a formula causes a far larger error, since all numbers of a trial
# are of the order of 1.
TOLERANCE = 1e-6


class Variant(NamedTuple):
    """The properties of a kernel for which Triton compiles it separately.

    Attributes:
        rule: Rule with fixed numbers: see `sample_of`.
        gradient: The dtype of the gradients.
        weight: The dtype of the weights. Defaults to `torch.float32`.
        kind: String, the key in `masters.KINDS` of 16-bit weights. Defaults to `None`,
            for float32 weights.
    """

    rule: Rule
    gradient: torch.dtype
    weight: torch.dtype = torch.float32
    kind: str | None = None

    def __str__(self):
        masters = f", masters: {self.kind}" if self.kind else ""
        return (
            f"{self.rule}, gradients in {self.gradient}, weights in {self.weight}"
            f"{masters}"
        )

    @property
    def names(self):
        """Tuple of the names of a trial's rows: see `_rows`."""
        kept = ["masters"] if self.keeps else []
        return "gradients", "weights", *self.rule.slots, *kept

    @property
    def keeps(self):
        """Whether something is kept with the weights."""
        return self.kind is not None and KINDS[self.kind].kept is not None


# All are exact in float32, so that only operations round. All are so large that leaving
# one out would be noticed.
_NUMBERS = {
    "learning_rate": 0.25,
    "alpha": 0.25,
    "decay": 0.0625,
    "weight_decay": 0.0625,
    "momentum": 0.875,
    "beta_1": 0.875,
    "beta_2": 0.75,
    "epsilon": 0.125,
}
_ON_DEVICE = ("learning_rate", "alpha", "decay")
_OPTIONS = ("nesterov", "classic_momentum")
_INV_SCALE, _ITERATIONS = 3 / 64, 77


def sample_of(rule):
    """Returns a rule with fixed numbers that compiles like this one.

    All rules of one variant have the same sample, by which verdicts are stored.
    """
    given = {
        field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)
    }
    numbers: dict[str, Any] = {
        name: _NUMBERS[name]
        for name, value in given.items()
        if name in _NUMBERS and value is not None
    }
    numbers |= {name: bool(given[name]) for name in _OPTIONS if name in given}
    if "weight_decay" in given and not given["weight_decay"]:
        numbers["weight_decay"] = 0.0
    if given.get("trust_ratio") is not None:
        is_paper = bool(given["trust_ratio"].paper)
        numbers["trust_ratio"] = TrustRatio(0.5, 0.125, paper=is_paper)
    return dataclasses.replace(rule, **numbers)


# --- The verdict --------------------------------------------------------------------

# From process, device and variant to a description of the fault, or None.
_verdicts: dict[tuple, str | None] = {}


def passes(variant, device, step, block):
    """Returns whether a kernel may step the user's tensors; None if not yet known.

    No trial runs while a CUDA graph is captured: the graph would record the trial too.

    Args:
        variant: `Variant`.
        device: `torch.device` on which the kernel is to run.
        step: Callable `(chunk, rule, grads, inv_scale, found_inf, iterations)` that
            steps a `Chunk` by the kernel, and returns whether it did.
        block: Int, the number of elements in a block of the kernel.

    Raises:
        RuntimeError: If the kernel failed, and `KERAS_LSO_KERNELS=triton` requires it.
    """
    # With the process, since a process that is forked from this one tries again.
    key = os.getpid(), device, variant
    if key not in _verdicts:
        if _is_recorded(device):
            return None
        _verdicts[key] = fault = _fault_of(variant, device, step, block)
        if fault and kernel_choice.KERNELS != "triton":
            warnings.warn(
                f"A Triton kernel of keras_lso failed its trial on {device}, and will "
                f"not be used: PyTorch's own kernels step in its place. Please report "
                f"this. Kernel: {variant}. Fault: {fault}",
                stacklevel=2,
            )
    fault = _verdicts[key]
    if fault and kernel_choice.KERNELS == "triton":
        raise RuntimeError(
            f"A Triton kernel of keras_lso failed its trial on {device}, and "
            "KERAS_LSO_KERNELS='triton' asks for it. No weight was changed. With "
            "KERAS_LSO_KERNELS=framework PyTorch's own kernels step in its place. "
            f"Please report this. Kernel: {variant}. Fault: {fault}"
        )
    return not fault


def _is_recorded(device):
    """Whether a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fault_of(variant, device, step, block):
    """Returns a description of a kernel's fault, or None."""
    try:
        with _undisturbed(device):
            return _try(variant, device, step, block)
    # Whatever the error is, PyTorch's own kernels can step in place of this one.
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _undisturbed(device):
    """Shields the trial from the user's contexts and from the debug mode."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.device("cpu"),
        keras.device(str(device)),
    ):
        if device.type != "cuda":
            yield
            return
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


# --- The trial ----------------------------------------------------------------------
#
# A kernel steps views of rows, which are flat tensors. Between two views there are
# elements that nothing may write.


def _try(variant, device, step, block):
    """Returns a description of a kernel's fault, or None."""
    rule, places = variant.rule, _places(variant.rule, device, block)
    before = _rows(variant, places)
    odd = _with_odd_numbers(before, places)
    applied = _stepped(variant, before, places, device, step, found_inf=0.0)
    skipped = _stepped(variant, odd, places, device, step, found_inf=1.0)
    if not (applied and skipped):
        return "it does not take the tensors"
    found = _read([*applied, *skipped])
    applied, skipped = found[: len(before)], found[len(before) :]
    expected = _expected(variant, before, applied, places)
    inexact = set(rule.slots) | ({"weights"} if variant.kind is None else set())
    for i, name in enumerate(variant.names):
        tolerance = TOLERANCE if name in inexact else 0.0
        fault = _difference(applied[i], expected[i], places, tolerance)
        if fault:
            return f"after a step {fault} in the {name}"
        if not torch.equal(_bits(skipped[i]), _bits(odd[i])):
            return f"a step that is skipped changes the {name}"
    return None


def _places(rule, device, block):
    """Returns the places of the tensors in a row, a list of slices."""
    sizes = [1, 5, block, 2 * block + 7, 3 * block]
    if rule.takes_norms and device.type != "cpu":
        # More blocks than have their sums added at once. Without a GPU, Triton's
        # interpreter would take ten seconds for this tensor.
        sizes.insert(0, 1025 * block + 3)
    places, start = [], 64
    for size in sizes:
        places.append(slice(start, start + size))
        # A multiple of 64, so that all tensors are aligned, apart from the last.
        start += (size // 64 + 2) * 64
    askew = places.pop()
    return [*places, slice(askew.start + 1, askew.stop + 1)]


def _rows(variant, places):
    """Returns rows on the host: see `Variant.names`."""
    # A separate generator, so that the user's random numbers stay as they are.
    generator = torch.Generator("cpu").manual_seed(0)
    size = (places[-1].stop // 64 + 2) * 64

    def row():
        return torch.randn(size, generator=generator, dtype=torch.float32)

    gradients, weights = (16 * row()).to(variant.gradient), row()
    slots = [row() for _ in variant.rule.slots]
    # The second slot is an average of squares.
    slots[1:] = [slot.square() for slot in slots[1:]]
    if variant.kind is None:
        return [gradients, weights, *slots]
    # Only one tensor exceeds the largest float16. For the others, the tolerance stays
    # relative to 1.0.
    weights[places[-3]] *= 7e4
    dtype = keras.backend.standardize_dtype(variant.weight)
    bits = torch.zeros(size, dtype=torch.int32)
    with keras.device("cpu"):
        low, kept = KINDS[variant.kind].parts(_REFERENCE, weights, dtype, bits)
    for place in places:
        # As if they had been assigned.
        low[place][2::5], low[place][3::5] = 7.0, 0.0
    return [gradients, low, *slots, *([] if kept is None else [kept])]


# NaNs that arithmetic would not return.
_NANS = {
    torch.float32: (torch.int32, 0x7FA00001),
    torch.float16: (torch.int16, 0x7D01),
    torch.bfloat16: (torch.int16, 0x7FA1),
}


def _with_odd_numbers(rows, places):
    """Returns rows with -0.0 and NaNs in each tensor, and gradients that overflow."""
    rows = [row.clone() for row in rows]
    for place in places:
        rows[0][place] = torch.inf
        for row in filter(torch.is_floating_point, rows[1:]):
            integers, nan = _NANS[row.dtype]
            row[place.start] = -0.0
            row.view(integers)[place.stop - 1] = nan
    return rows


def _chunk(variant, rows, places):
    """Returns the `Chunk` of the tensors in some rows, and their gradients."""
    grads, weights, *slots = ([row[place] for place in places] for row in rows)
    kept = slots.pop() if variant.keeps else [None] * len(places)
    narrow = []
    if variant.kind is not None:
        pairs = enumerate(zip(weights, kept, strict=True))
        narrow = [Narrow(KINDS[variant.kind], *pair, i) for i, pair in pairs]
    are_wide, positions = variant.gradient == torch.float32, list(range(len(places)))
    draws = draws_of(narrow, weights)
    return Chunk(are_wide, positions, weights, slots, narrow, draws), grads


def _stepped(variant, rows, places, device, step, found_inf):
    """Returns copies of rows after a step by the kernel; no rows if it declines."""
    rows = [row.to(device, copy=True) for row in rows]

    def number(value):
        return torch.tensor(value, dtype=torch.float32, device=device)

    rule = variant.rule
    on_device = {
        name: number(value)
        for name, value in vars(rule).items()
        if name in _ON_DEVICE and value is not None
    }
    rule = dataclasses.replace(rule, **on_device)
    chunk, grads = _chunk(variant, rows, places)
    iterations = torch.tensor(_ITERATIONS, dtype=torch.int32, device=device)
    scale_and_flag = number(_INV_SCALE), number(found_inf)
    did = step(chunk, rule, grads, *scale_and_flag, iterations)
    return rows if did else []


def _read(rows):
    """Returns rows on the host, by one copy from the device."""
    flat = torch.cat([_bits(row) for row in rows]).cpu()
    sizes = [_bits(row).numel() for row in rows]
    parts = zip(flat.split(sizes), rows, strict=True)
    return [part.clone().view(row.dtype) for part, row in parts]


def _bits(row):
    return row.view(torch.uint8)


def _expected(variant, rows, applied, places):
    """Returns rows after a step by the formulas, on the host.

    Args:
        variant: `Variant`.
        rows: Rows before the step.
        applied: Rows after the step by the kernel.
        places: List of slices.
    """
    rows = [row.clone() for row in rows]
    (chunk, grads), (own, _) = (_chunk(variant, r, places) for r in (rows, applied))
    with keras.device("cpu"):
        for i, (weight, *slots) in enumerate(
            zip(chunk.variables, *chunk.slots, strict=True)
        ):
            number = chunk.narrow[i].number(_REFERENCE) if chunk.narrow else weight
            unscaled = grads[i].float() * _INV_SCALE
            norms = _REFERENCE.norms_of(variant.rule, unscaled, number, *slots)
            new = variant.rule(formulas, always, unscaled, number, *slots, norms=norms)
            written = list(zip((weight, *slots), new, strict=True))
            if chunk.narrow:
                written[:1] = _nearest(chunk.narrow[i], own.narrow[i], new[0])
            for tensor, value in written:
                tensor.copy_(value)
    return rows


def _nearest(narrow, own, number):
    """Returns the rounded number, chosen within the tolerance to be near the kernel's.

    The kernel's number may be off in its last bits, which may decide how it rounds.

    Args:
        narrow: `Narrow` before the step.
        own: The same `Narrow` after the step by the kernel.
        number: Float32 tensor.
    """
    limit = _limit(number)
    least, most = number - limit, number + limit
    iterations = torch.tensor(_ITERATIONS)
    if not narrow.kind.draws:
        number = own.number(_REFERENCE).clamp(least, most)
        return narrow.parts(_REFERENCE, number, iterations)
    low, high = (narrow.parts(_REFERENCE, n, iterations)[0][1] for n in (least, most))
    return [(narrow.weight, own.weight.clamp(low, high))]


def _limit(tensor, tolerance=TOLERANCE):
    """Returns the absolute tolerance for a tensor."""
    return tolerance * float(tensor.abs().max().clamp_min(1.0))


def _difference(row, expected, places, tolerance):
    """Returns a description of a row's errors, or None if it fits the expected row."""
    # Double: the difference of two float16 numbers may exceed float16.
    errors, limits = (row.double() - expected.double()).abs(), torch.zeros(row.numel())
    for place in places:
        limits[place] = _limit(expected[place], tolerance)
    # Not `errors > limits`, which is False for a NaN.
    wrong = torch.logical_not(errors <= limits)
    if not wrong.any():
        return None
    worst = float(errors.max())
    return f"{int(wrong.sum())} elements are off by up to {worst:.3g}"
