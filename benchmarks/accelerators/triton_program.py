"""The programs that Triton compiles our kernels to, and the bytes that they move.

For an H100 or H200, without a GPU: the programs that its driver would load.
"""

import collections
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keras_lso._backend.torch.triton import kernels

HOPPER = GPUTarget("cuda", 90, 32)
_ACCESS = re.compile(r"^\s*(@\S+ )?(ld|st)\.global(\.v(\d))?\.b(\d+)", re.MULTILINE)


def compiled(name, types, constants):
    """Returns the PTX of a kernel, a string.

    Args:
        name: String, its name in `kernels.py`.
        types: Dict of Triton's names of the types of its arguments.
        constants: Dict of its other arguments, which are compiled into it.
    """
    kernel = getattr(kernels, name)
    names = kernel.arg_names
    assert set(names) == set(types) | set(constants)
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
    )
    options = {"num_warps": kernels.WARPS, "enable_fp_fusion": False}
    return triton.compile(source, target=HOPPER, options=options).asm["ptx"]


def bytes_of_blocks(ptx):
    """Returns what a block of tensors moves for each element: whole blocks, and others.

    The one moves 16 bytes at once. The other has a predicate for each element, and one
    of the two runs. What is read of the tables is for the block, not for its elements.
    """
    # The elements of a thread.
    each = kernels.BLOCK // (kernels.WARPS * 32)
    counts = collections.Counter()
    for predicate, _, _, lanes, width in _ACCESS.findall(ptx):
        size = int(width) // 8 * int(lanes or 1)
        if lanes:
            counts["whole"] += size
        elif predicate:
            counts["masked"] += size
    if ".entry lars_squares" in ptx:
        # The two sums of a block, which one thread writes.
        counts["masked"] -= 2 * 4
    return counts["whole"] / each, counts["masked"] / each
