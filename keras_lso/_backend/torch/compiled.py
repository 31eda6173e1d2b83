"""The step of a chunk with 16-bit numbers as one function, compiled by Inductor.

Operation by operation, the formulas of a rule and of its numbers read and write their
tensors some forty times. As one function, traced from the same formulas, they read and
write them once. It is compiled for all sizes, in seconds, at the first step, and
Inductor keeps the result for the next process. On a GPU it is the default; elsewhere
`KERAS_LSO_KERNELS=compile` turns it on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._triton import has_triton

from keras_lso._backend import codecs
from keras_lso._backend.codecs import PLAIN, Codec
from keras_lso._backend.framework import KERNELS, Framework
from keras_lso._backend.leaves import Leaf, draw_of_slot
from keras_lso._backend.rule import Rule, always, given
from keras_lso._backend.tensors import Number
from keras_lso._backend.torch import xp
from keras_lso._backend.torch.flat import gathered, moved_together, view_of
from keras_lso._backend.torch.masters import CODECS_OF_SLOTS, keys_in_kernel

if TYPE_CHECKING:
    from keras_lso._backend.torch.update import Columns, StepContext

IS_ON = KERNELS == "compile"
_IS_ON_FOR_GPUS = os.environ.get("KERAS_LSO_KERNELS", "graph") == "graph"
# Each rule, dtype and kind has its own form of the function, and others for one tensor
# and in inference mode: a handful in a run. A process may have all that there are: an
# update sets these limits.
LIMITS = {"recompile_limit": 1000, "accumulated_recompile_limit": 1000}
_has_failed = False


def is_on(tensor: Tensor) -> bool:
    """Whether steps on the device of a tensor are compiled."""
    return not _has_failed and (
        IS_ON or (_IS_ON_FOR_GPUS and tensor.is_cuda and has_triton())
    )


def step(ctx: StepContext, rule: Rule, columns: Columns) -> bool:
    """Makes the step of a chunk as `update` does; returns whether it did."""
    # A rule may have a norm or a slot of one number for each tensor, and the function
    # takes a chunk for one tensor.
    if (rule.takes_norms or rule.scalars) and len(columns.weights) > 1:
        return False
    if rule.mixes_matrices:  # Of a flat tensor.
        return False
    chunk, leaves = columns.chunk, columns.leaves()
    positions = {leaf.position for leaf in leaves if leaf.codec.is_random}
    if chunk.codec is PLAIN and not positions:
        return False
    # The compiler takes 0 and 1 for special sizes.
    if sum(map(torch.Tensor.numel, columns.weights)) < 2:
        return False
    slots = zip(columns.slots, columns.scales, strict=True)
    written = [columns.weights, columns.aux, *itertools.chain(*slots)]
    written = list(filter(None, written))
    # The weights are the model's, and are not moved.
    views = [view_of(columns.weights), *map(moved_together, written[1:])]
    pairs = zip(written, views, strict=True)
    flat = [gathered(column) if view is None else view for column, view in pairs]
    keys: dict[int, Tensor] = {}
    table = None
    # On the host Inductor does not vectorize int16, nor the search for a key.
    if ctx.is_on_host:
        flat = [f.int() if f.dtype == torch.int16 else f for f in flat]
    if ctx.is_on_host or not ctx.strides.keys().isdisjoint(chunk.positions):
        with ctx.without_host():
            keys = {p: chunk.keys(ctx, p) for p in positions}
    elif positions:
        table = chunk.random_bits.table, ctx.iterations
    norms = columns.norms[0] if columns.norms and rule.takes_norms else None
    # Inductor reads memory without the negative bit, which a view of one tensor has.
    read = [_flatten_dense_tensors(columns.grads).resolve_neg(), *flat]
    # With its blocks as rows the kernel of the rest is that of their maxima.
    block = max(leaf.codec.block for leaf in leaves)
    if block > 1:
        rows = read[0].numel() // block
        # But not a slot that is one number.
        read = [t if t.numel() == 1 else t.view(rows, -1) for t in read]
        keys = {p: of_elements.view(rows, -1) for p, of_elements in keys.items()}
    if not _run(ctx, rule, chunk.codec, read, keys, table, norms):
        return False
    for column, view, new in zip(written, views, flat, strict=True):
        if new is not view:
            torch._foreach_copy_(column, _unflatten_dense_tensors(new, column))
        torch.autograd.graph.increment_version(column)
    return True


@contextlib.contextmanager
def _quiet_if_mixed(columns: list[Tensor]) -> Iterator[None]:
    """Hides Inductor's warning of float16 weights with bfloat16 slots."""
    # No loop of its mixes them. Not for other steps: a context of warnings makes Python
    # forget which warnings it has shown, and it would show them after each step again.
    if {torch.float16, torch.bfloat16} <= {c.dtype for c in columns}:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")
            yield
    else:
        yield


def _run(
    ctx: StepContext, rule: Rule, codec: Codec, columns: list[Tensor], *more: Any
) -> bool:
    """Runs the compiled function; returns whether it has made the step."""
    global _has_failed
    if _has_failed:  # In the same step.
        return False
    args = ctx.framework, ctx.factor, ctx.flag, rule, codec, columns, *more
    try:
        with _quiet_if_mixed(columns):
            return _compiled(columns[0].dim() > 1)(*args)
    except RuntimeError as error:
        _has_failed = True
        warnings.warn(
            "torch.compile has failed, and the steps of 16-bit weights and slots run "
            "without it, by the same formulas. The cause: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False


@functools.cache
def _compiled(in_blocks: bool) -> Callable[..., bool]:
    """Returns the function for which Inductor makes one kernel."""
    # Casts round as they do outside, and are not left out between two operations.
    options = {"emulate_precision_casts": True}
    if in_blocks:
        # Otherwise the factor of a row's number, for random bits, is beyond int32.
        options["constant_and_index_propagation"] = False
    return torch.compile(_step, fullgraph=True, dynamic=True, options=options)


def _step(
    framework: Framework,
    factor: Number,
    flag: Tensor | None,
    rule: Rule,
    codec: Codec,
    columns: list[Tensor],
    keys: dict[int, Tensor],
    table: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, ...] | None,
) -> bool:
    """Writes the step of flat tensors into `columns`; returns whether it did."""
    gradient, weight, *slots = columns
    aux = None if codec.aux_dtype is None else slots.pop(0)
    leaves = [Leaf(weight, codec, aux)]
    rest = iter(slots)
    for i, slot in enumerate(rest):
        of_slot = CODECS_OF_SLOTS.get(slot.dtype, PLAIN)
        scales = None if of_slot.aux_dtype is None else next(rest)
        leaves.append(Leaf(slot, of_slot, scales, *draw_of_slot(0, i)))
    measure = None
    if rule.takes_norms:
        measure = _norms_of if norms is None else given(norms)
    old = [leaf.codec.decode(framework, leaf.variable, leaf.aux) for leaf in leaves]
    new = rule(xp, always, gradient.float() * factor, *old, norms=measure)
    # Inductor leaves out the copy of an old value that another slot takes.
    if any(v is o for i, v in enumerate(new) for o in [*old[:i], *old[i + 1 :]]):
        return False
    for leaf, value in zip(leaves, new, strict=True):
        bits = None
        if leaf.codec.is_random:
            if table is None:
                of_elements = keys[leaf.position]
            else:
                of_elements = keys_in_kernel(*table, leaf.position, weight)
            bits = codecs.drawn(framework, of_elements) >> leaf.shift
        dtype = leaf.variable.dtype
        encoded = leaf.codec.encode(framework, value, dtype, bits)
        for tensor, part in zip((leaf.variable, leaf.aux), encoded, strict=True):
            if part is not None:
                tensor.copy_(part if flag is None else torch.where(flag, part, tensor))
    return True


def _norms_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the L2 norms of tensors, whose squares may leave the range of float32."""
    return tuple(
        torch.linalg.vector_norm(t, dtype=torch.float64).float() for t in tensors
    )
