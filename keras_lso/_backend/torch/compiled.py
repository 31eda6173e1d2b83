"""The step of a chunk with 16-bit numbers as one function, compiled by Inductor.

Operation by operation, the formulas of a rule and of its numbers read and write their
tensors some forty times. As one function, traced from the same formulas, they read and
write them once. It is compiled for all sizes, in seconds, at the first step, and
Inductor keeps the result for the next process. On a GPU it is the default; elsewhere
`KERAS_LSO_KERNELS=compile` turns it on.
"""

import contextlib
import functools
import os
import warnings

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._triton import has_triton

from keras_lso._backend import codecs, xp
from keras_lso._backend.codecs import PLAIN
from keras_lso._backend.framework import KERNELS
from keras_lso._backend.leaves import SLOT_CODEC, draw_of_slot
from keras_lso._backend.rule import always, given
from keras_lso._backend.torch.masters import DTYPE_OF_SLOTS

IS_ON = KERNELS == "compile"
# Each rule, dtype and kind has its own form of the function, and others for one tensor
# and in inference mode: a handful in a run. A process may have all that there are: an
# update sets these limits.
LIMITS = {"recompile_limit": 1000, "accumulated_recompile_limit": 1000}
_has_failed = False


def is_on(tensor):
    """Whether steps on the device of a tensor are compiled."""
    is_default = "KERAS_LSO_KERNELS" not in os.environ and tensor.is_cuda
    return not _has_failed and (IS_ON or (is_default and has_triton()))


def step(ctx, rule, chunk, aux, columns, norms):
    """Makes the step of a chunk as `update` does; returns whether it did."""
    _, weights, *slots = columns
    # A rule may have a norm or a slot of one number for each tensor, and the function
    # takes a chunk for one tensor.
    if (rule.takes_norms or rule.scalars) and len(weights) > 1:
        return False
    codec, offsets = chunk.codec, {0} if chunk.codec.is_random else set()
    for i, column in enumerate(slots):
        if column[0].dtype is DTYPE_OF_SLOTS:
            offsets.add(draw_of_slot(0, i)[0])
    if codec is PLAIN and not offsets:
        return False
    with ctx.without_host():
        random_bits, iterations = chunk.random_bits, ctx.iterations
        keys = {offset: random_bits.keys(iterations, offset) for offset in offsets}
    norms = norms[0] if norms and rule.takes_norms else None
    wide = _flatten_dense_tensors(aux) if aux else None
    if wide is not None and wide.dtype == torch.int16:
        wide = wide.int()  # Inductor does not vectorize int16.
    gradient, weight, *flat = map(_flatten_dense_tensors, columns)
    # The compiler takes 0 and 1 for special sizes.
    if weight.numel() < 2 or not _run(
        ctx, rule, codec, [gradient, weight, wide, *flat], keys, norms
    ):
        return False
    written = [(weights, weight), *zip(slots, flat, strict=True)]
    if aux:
        written.append((aux, wide))
    for column, new in written:
        # A column of one tensor may itself have been written.
        if new.data_ptr() != column[0].data_ptr():
            torch._foreach_copy_(column, _unflatten_dense_tensors(new, column))
        torch.autograd.graph.increment_version(column)
    return True


@contextlib.contextmanager
def _quiet_if_mixed(columns):
    """Hides Inductor's warning of float16 weights with bfloat16 slots."""
    # No loop of its mixes them. Not for other steps: a context of warnings makes Python
    # forget which warnings it has shown, and it would show them after each step again.
    if {torch.float16, torch.bfloat16} <= {c.dtype for c in columns if c is not None}:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")
            yield
    else:
        yield


def _run(ctx, rule, codec, columns, *more):
    """Runs the compiled function; returns whether it has made the step."""
    global _has_failed
    if _has_failed:  # In the same step.
        return False
    args = ctx.framework, ctx.factor, ctx.flag, rule, codec, columns, *more
    try:
        with _quiet_if_mixed(columns):
            return _compiled()(*args)
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
def _compiled():
    """Returns the function for which Inductor makes one kernel."""
    # Casts round as they do outside, and are not left out between two operations.
    options = {"emulate_precision_casts": True}
    return torch.compile(_step, fullgraph=True, dynamic=True, options=options)


def _step(framework, factor, flag, rule, codec, columns, keys, norms):
    """Writes the step of flat tensors into `columns`; returns whether it did."""
    gradient, weight, aux, *slots = columns
    measure = None
    if rule.takes_norms:
        measure = _norms_of if norms is None else given(norms)
    master = codec.decode(framework, weight, aux)
    old = [master, *(slot.float() for slot in slots)]
    new = rule(xp, always, gradient.float() * factor, *old, norms=measure)
    # Inductor leaves out the copy of an old value that another slot takes.
    if any(v is o for i, v in enumerate(new) for o in [*old[:i], *old[i + 1 :]]):
        return False
    states = [(codec, (0, 0), weight, aux)]
    for i, slot in enumerate(slots):
        of_slot = SLOT_CODEC if slot.dtype is DTYPE_OF_SLOTS else PLAIN
        states.append((of_slot, draw_of_slot(0, i), slot, None))
    for (codec, (offset, shift), *stored), value in zip(states, new, strict=True):
        bits = None
        if codec.is_random:
            bits = codecs.drawn(framework, keys[offset]) >> shift
        encoded = codec.encode(framework, value, stored[0].dtype, bits)
        for old, part in zip(stored, encoded, strict=True):
            if part is not None:
                old.copy_(part if flag is None else torch.where(flag, part, old))
    return True


def _norms_of(*tensors):
    """Returns the L2 norms of tensors, whose squares may leave the range of float32."""
    return tuple(
        torch.linalg.vector_norm(t, dtype=torch.float64).float() for t in tensors
    )
