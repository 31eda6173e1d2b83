"""What the engines have in common that average gradients over processes.

An engine is what lets processes talk to each other: the framework's own, or Horovod.
Each framework says in its `_*_processes.py` which one runs and how it takes a mean.
"""

import hashlib
import json
import sys

import keras
from keras import ops


def horovod(framework):
    """Returns Horovod's module for the framework if it is initialised, else None."""
    # Nobody has initialised what nobody has imported.
    module = sys.modules.get(f"horovod.{framework}")
    if module is None:
        return None
    try:
        module.size()
    except ValueError:  # "Horovod has not been initialized; use hvd.init()."
        return None
    return module


def check_run(count, how_to_start):
    """Refuses to average where no engine runs.

    Args:
        count: What `count_processes` returned.
        how_to_start: String, a sentence on how to start one.
    """
    if count is None:
        raise RuntimeError(
            "To average gradients over processes (`on_horovod=True`), something must "
            f"connect the processes, and nothing does. {how_to_start}"
        )


def or_horovod(framework):
    """The part of `how_to_start` on Horovod."""
    return (
        f"Or install Horovod, `import horovod.{framework} as hvd`, call `hvd.init()` "
        "and start the program by `horovodrun -np 2 python train.py`."
    )


def digest(descriptions):
    """Returns 32 bytes that are the same where the descriptions are."""
    return hashlib.sha256(_encode(descriptions)).digest()


def agree(grads, exchange):
    """Returns the gradients that all processes are to have, in the same order.

    All of them meet here first: with other tensors than its peer's a process would
    wait in the mean for ever, or add up gradients of different variables. Where some
    have no gradient, theirs is zero. This costs an exchange of 40 bytes.

    Args:
        grads: List of dense tensors or None.
        exchange: Callable. It takes as many bytes on each process and returns the
            list of what they are on all of them, in the order of the processes.

    Returns:
        The list of tensors; None where no process has one.

    Raises:
        RuntimeError: On all processes, if their gradients are not alike.
    """
    mine = [_describe(g) for g in grads]
    size = len(_encode(mine))
    answers = exchange(digest(mine) + size.to_bytes(8, "big"))
    if len(set(answers)) == 1:
        return grads
    longest = max(int.from_bytes(answer[32:], "big") for answer in answers)
    # JSON may end in blanks.
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
    """Returns what each gradient is on those processes that have it."""
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


def map_by_dtype(fn, grads):
    """Applies `fn` to the lists of all tensors of one dtype; None stays None.

    Args:
        grads: List of tensors or None.
        fn: Callable that takes a list of tensors and returns one.
    """
    positions: dict[str, list[int]] = {}
    for i, g in enumerate(grads):
        if g is not None:
            dtype = keras.backend.standardize_dtype(g.dtype)
            positions.setdefault(dtype, []).append(i)
    results = [None] * len(grads)
    # In an order that is the same on all processes.
    for _, group in sorted(positions.items()):
        for i, result in zip(group, fn([grads[i] for i in group]), strict=True):
            results[i] = result
    return results
