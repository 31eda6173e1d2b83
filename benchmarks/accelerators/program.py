"""What a program that XLA has compiled does, read off its text."""

import math
import re
from dataclasses import dataclass

_SIZES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4}
_SIZES |= {"f16": 2, "bf16": 2, "s16": 2, "u16": 2, "s8": 1, "u8": 1, "pred": 1}
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
# An array, and where in its layout the memory space is: 0 or none is the device's.
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_HEADING = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_HOST = re.compile(r"\b(?:infeed|outfeed|send|recv)\(|callback|host_compute")
# These run no kernel, or end one that another has begun.
_FREE = {
    "parameter", "get-tuple-element", "bitcast", "tuple", "constant", "after-all",
    "copy-done", "slice-done", "all-reduce-done", "async-done", "optimization-barrier",
}  # fmt: skip
_MESSAGES = {"all-reduce", "reduce-scatter", "all-gather", "collective-permute"}


@dataclass(frozen=True)
class Instruction:
    """An instruction of the program.

    Attributes:
        type: String, of what it returns.
        operation: String, as `"fusion"`.
        operands: List of the names of instructions.
        rest: String, its attributes.
    """

    type: str
    operation: str
    operands: list
    rest: str

    @property
    def is_kernel(self):
        """Whether it runs on the device for itself."""
        return self.operation not in _FREE and "ConcatBitcast" not in self.rest


class Program:
    """A compiled program.

    Args:
        text: String, what `Compiled.as_text()` returns.

    Attributes:
        instructions: Dict of the main computation's `Instruction`s by their names.
    """

    def __init__(self, text):
        self._text = text
        self._computations = _computations(text)
        self.instructions = self._computations[None]

    def count(self, *operations):
        """Returns how many instructions are of these operations."""
        return sum(i.operation in operations for i in self.instructions.values())

    @property
    def kernels(self):
        """How many kernels it runs, or copies that run beside them."""
        return sum(i.is_kernel for i in self.instructions.values())

    def messages(self):
        """Yields the kind of each exchange of data, and the bytes that a device gives.

        A TPU has no reduce-scatter, but a kernel that is called so.
        """
        for computation, instructions in self._computations.items():
            is_part = (computation or "").startswith("all-reduce-scatter")
            for instruction in instructions.values():
                kind = instruction.operation.removesuffix("-start")
                if kind in _MESSAGES:
                    given = [instructions[name].type for name in instruction.operands]
                    sizes = [size for type_ in given for size, _ in _arrays(type_)]
                    yield "reduce-scatter" if is_part else kind, sum(sizes)

    @property
    def host_transfers(self):
        """How often it exchanges data with the host."""
        return len(_HOST.findall(self._text))

    @property
    def aliased(self):
        """How many results are written where an argument was."""
        return self._text.split("entry_computation_layout")[0].count("-alias)")

    @property
    def bytes(self):
        """How many bytes its kernels read from the device's memory, and write to it.

        Each kernel reads what it is given and writes what it returns. Memory on the
        chip, in which a TPU keeps what is used next, does not count.
        """
        kernels = [i for i in self.instructions.values() if i.is_kernel]
        return sum(map(self._bytes_of, kernels))

    def _bytes_of(self, kernel):
        results = list(_arrays(kernel.type))
        if kernel.operation in ("copy-start", "slice-start"):
            # Among its results are where it reads and where it writes; a slice is as
            # large as the smaller of the two.
            pair = results[:2]
            size = min(size for size, _ in pair)
            return sum(size for _, on_chip in pair if not on_chip)
        given = [a for o in kernel.operands for a in _arrays(self._type_of(o))]
        return sum(size for size, on_chip in [*given, *results] if not on_chip)

    def _type_of(self, name):
        found = self.instructions.get(name)
        return found.type if found else ""


def _computations(text):
    """Returns the instructions of each computation by names; the main one's is None."""
    found = {None: {}}
    instructions = {}
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            is_main, name = heading.groups()
            instructions = found.setdefault(None if is_main else name, {})
        elif match := _LINE.match(line):
            name, type_, operation, rest = match.groups()
            arguments, rest = _split(rest)
            operands = re.findall(r"%([\w.\-]+)", arguments)
            instructions[name] = Instruction(type_, operation, operands, rest)
    return found


def _split(rest):
    """Splits what follows an opening bracket where that is closed."""
    depth = 1
    for end, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return rest[:end], rest[end + 1 :]
    return rest, ""


def _arrays(type_):
    """Yields the bytes of each array, and whether it is in memory on the chip."""
    for dtype, dimensions, layout in _ARRAY.findall(type_):
        if dtype in _SIZES:
            space = _SPACE.search(layout)
            size = _SIZES[dtype] * math.prod(map(int, re.findall(r"\d+", dimensions)))
            yield size, bool(space) and space.group(1) != "0"
