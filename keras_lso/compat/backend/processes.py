"""Averages gradients over processes: the code that the communication engines share.

The module of each framework finds the running engine, its own or Horovod, and takes the
mean with it.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_lso._backend.types import Tensor


def horovod(framework: str) -> Any:
    """Returns Horovod's module for the framework if it is initialised, else None."""
    module = sys.modules.get(f"horovod.{framework}")
    if module is None:
        return None
    try:
        module.size()
    except ValueError:  # "Horovod has not been initialized; use hvd.init()."
        return None
    return module


def or_horovod(framework: str) -> str:
    """Returns the part of `HOW_TO_START` on Horovod."""
    return (
        f"Or install Horovod, `import horovod.{framework} as hvd`, call `hvd.init()` "
        "and start the program by `horovodrun -np 2 python train.py`."
    )


def digest(descriptions: Any) -> bytes:
    """Returns a hash of 32 bytes."""
    return hashlib.sha256(_encode(descriptions)).digest()


def agree(grads: Any, exchange: Callable[[bytes], list[bytes]]) -> list[Tensor | None]:
    """Returns gradients of the same variables on all processes, in the same order.

    A process whose tensors differ from the others' would deadlock in the mean, or
    average gradients of different variables. A gradient that only some processes have
    is zero on the others, and None if no process has it. Processes that agree exchange
    40 bytes.

    Args:
        grads: Dense tensors or None.
        exchange: Callable that takes bytes, equally many on each process, and returns
            the list of the bytes of all processes, in the order of the processes.

    Raises:
        RuntimeError: On all processes, if their gradients do not match.
    """
    mine = [_describe(g) for g in grads]
    size = len(_encode(mine))
    answers = exchange(digest(mine) + size.to_bytes(8, "big"))
    if len(set(answers)) == 1:
        return grads
    longest = max(int.from_bytes(answer[32:], "big") for answer in answers)
    # JSON allows trailing blanks.
    everyone = [json.loads(text) for text in exchange(_encode(mine).ljust(longest))]
    return [
        g if kind is None or g is not None else ops.zeros(kind[1], dtype=kind[0])
        for g, kind in zip(grads, _merge(everyone), strict=True)
    ]


def _encode(descriptions):
    return json.dumps(descriptions).encode()


def _describe(grad):
    if grad is None:
        return None
    return [keras.backend.standardize_dtype(grad.dtype), list(grad.shape)]


def _merge(everyone):
    """Returns the description of each gradient on the processes that have it."""
    counts = [len(kinds) for kinds in everyone]
    if len(set(counts)) > 1:
        raise RuntimeError(
            "The processes must train the same variables. "
            f"Received lists of {counts} gradients from them."
        )
    merged = []
    for i, of_all in enumerate(zip(*everyone, strict=True)):
        kinds = [kind for kind in of_all if kind is not None]
        if any(kind != kinds[0] for kind in kinds):
            raise RuntimeError(
                "The processes must train the same variables. "
                f"Gradient {i} differs between them: {kinds}"
            )
        merged.append(kinds[0] if kinds else None)
    return merged
