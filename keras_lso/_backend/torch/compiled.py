"""The formulas of masters, compiled by Inductor: `KERAS_LSO_KERNELS=compile`.

Operation by operation, a formula reads and writes its tensors some twenty times. As one
function it reads and writes them once, and gives the same bits. It is compiled for all
sizes, in seconds, at the first step. Inductor keeps the result for the next process.
"""

import functools
import warnings

import torch

from keras_lso._backend import masters
from keras_lso._backend.framework import KERNELS

IS_ON = KERNELS == "compile"
# Each dtype and kind has its own form of a formula, and another in inference mode.
_MOST_FORMS = 64
_has_failed = False


def number(framework, kind, weight, kept):
    """Returns `Kind.number` of flat tensors; None if it is not compiled."""
    return _run(_number_of, framework, kind, weight, kept)


def parts(framework, kind, number, dtype, keys, shift):
    """Returns `Kind.parts`, given the `Draws.keys`; None if it is not compiled."""
    return _run(_parts_of, framework, kind, number, dtype, keys, shift)


def _number_of(framework, kind, weight, kept):
    return kind.number(framework, weight, kept)


def _parts_of(framework, kind, number, dtype, keys, shift):
    bits = None if keys is None else masters.drawn(framework, keys) >> shift
    return kind.parts(framework, number, dtype, bits)


def _run(formula, framework, kind, *arguments):
    """Runs a compiled formula; returns None if it is off, or if the compiler fails."""
    global _has_failed
    # The compiler takes 0 and 1 for special sizes.
    if not IS_ON or _has_failed or arguments[0].numel() < 2:
        return None
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_FORMS):
            return _compiled(formula)(framework, kind, *arguments)
    except RuntimeError as error:
        _has_failed = True
        warnings.warn(
            "KERAS_LSO_KERNELS=compile: torch.compile has failed, and 16-bit weights "
            "and slots are rounded without it, by the same formulas. The cause: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return None


@functools.cache
def _compiled(formula):
    """Returns a formula for which Inductor makes one kernel."""
    # Casts round as they do outside, and are not left out between two operations.
    options = {"emulate_precision_casts": True}
    return torch.compile(formula, fullgraph=True, dynamic=True, options=options)
