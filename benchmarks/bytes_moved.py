"""The bytes that a step cannot avoid moving to or from memory.

Nothing may be written before every gradient has been read: one that is not finite,
in the last tensor, forbids the first write. So, where tensors are larger than the
caches, a scaled step reads each gradient twice, once to check it and once to use it.
Everything else it needs to touch once:

    bytes = 2 * gradients                   # check, update
          + weights * (read + write)
          + slots * (read + write)
          + weights, where the rule takes their norms first   (LARS)
          + 16-bit variables * write, where the weights are float32 masters
          + remainders * (read + write), where 16-bit variables have some

LARS needs the norms of weights and gradients before it can scale the update. The norm
of the gradients is the check, so it costs nothing; that of the weights is a read. An
optimizer that checks nothing reads its gradients once, unless it takes their norms.

Divided by the speed at which the machine moves memory, that is the time a step takes at
least, but for what the caches keep from one step to the next: of many-small, all.
"""

from benchmarks.inner import INNER
from benchmarks.shapes import SHAPES, parameters

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


def bytes_of_step(shapes, inner, kind, checks=True, masters=None, slots=None):
    """Returns the number of bytes that a step has to move.

    Args:
        shapes: String. One of `SHAPES`.
        inner: String. One of `INNER`.
        kind: String. `"float32"`, `"float16"` or `"bfloat16"`: the dtype of the
            variables and gradients.
        checks: Bool. Whether the step checks that its gradients are finite.
        masters: String, `"float32"`, `"remainder"`, `"remainder8"` or `"stochastic"`:
            in which way variables of 16 bits are trained as float32 numbers. False if
            they are not. Defaults to `"float32"`, and to False for float32 variables.
        slots: String, the value of `slot_dtype`. Defaults to `None`.
    """
    rule, size = INNER[inner], _BYTES[kind]
    if masters is None:
        masters = False if kind == "float32" else "float32"
    # What a number is made of, and what is only written.
    weight_size, copy_size = {
        False: (size, 0),
        "float32": (4, size),
        "remainder": (size + 2, 0),
        "remainder8": (size + 1, 0),
        "stochastic": (size, 0),
    }[masters]
    slot_size = _BYTES[slots] if slots else 4 if masters else size
    gradient_reads = 2 if checks or rule.weight_norms else 1
    weight_accesses = 3 if rule.weight_norms else 2
    for_each_parameter = (
        gradient_reads * size
        + weight_accesses * weight_size
        + 2 * rule.slots * slot_size
        + copy_size
    )
    return for_each_parameter * parameters(SHAPES[shapes]())
