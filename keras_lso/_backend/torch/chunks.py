"""The facts that the fused step on PyTorch computes once: the chunks of tensors.

Reading the attributes of a thousand tensors in Python takes longer than updating them.
"""

import dataclasses
import math
import operator
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.kernels import Memory
from keras_lso._backend.torch.masters import Draws
from keras_lso._backend.torch.measure import PLAIN, SMALL, Packs
from keras_lso._backend.torch.shard_checks import FSDP_MODULES
from keras_lso._backend.torch.shards import any_sharded, shards_of

# The number of elements in a chunk, unless one tensor has more. At this size the cache
# still holds the results of one operation when the next reads them.
_HOST_CHUNK = 2**20
_DEVICE_CHUNK = 2**23
# In elements, 16 MiB. Up to this size, memory is kept between steps. An allocator sorts
# the memory that others have freed at the next request, which may take longer than a
# step.
_KEPT_MEMORY = 2**22

_dtype, _shape = map(operator.attrgetter, ("dtype", "shape"))


def context_guards():
    """See `Framework.context_guards`. Includes the modules that FSDP has sharded."""
    if torch.compiler.is_compiling():
        return None
    return set(map(id, FSDP_MODULES))


def tensor_guards(grads):
    """See `Framework.tensor_guards`."""
    return _guards_of(grads)


def _guards_of(tensors):
    """Returns a predicate: whether other tensors are like these, apart from values.

    It compares the dtype, the shape, the layout and the negative bit. The guards of
    `torch.compile` do so in one call, in a sixth of the time of a getter per tensor.
    They do not support sparse tensors and shards.
    """
    is_plain = set(map(type, tensors)) <= PLAIN and not torch.compiler.is_compiling()
    if is_plain and {t.layout for t in tensors} == {torch.strided}:
        guards = TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        return lambda others: guards.check(*others)
    facts = _facts_of(tensors)
    return lambda others: _facts_of(others) == facts


def _facts_of(tensors):
    try:
        layouts = list(map(torch.Tensor.is_contiguous, tensors))
    except RuntimeError:  # Not every sparse layout implements it.
        layouts = [False] * len(tensors)
    if not all(layouts):
        # It may be False for a sparse tensor, as it is for a dense one with gaps.
        layouts = [known or t.layout for known, t in zip(layouts, tensors, strict=True)]
    signs = map(torch.Tensor.is_neg, tensors)
    return [*map(_dtype, tensors), *map(_shape, tensors), *layouts, *signs]


@dataclasses.dataclass
class Chunk:
    """Tensors that are updated together, by one rule.

    Attributes:
        positions: List of ints, the positions of the tensors among all tensors.
        variables: List of tensors: float32 ones, or weights of 16 bits.
        slots: List of lists of tensors, one for each slot of the rule.
        narrow: List of the `Narrow` weights of the variables, which are of one kind and
            dtype; empty for float32 variables.
        draws: `Draws` of the random bits for `narrow`; None if their kind draws none.
        written: The versions of masters and weights after the last step on an
            accelerator.
    """

    positions: list[int]
    variables: list
    slots: list
    narrow: list
    draws: Draws | None = None
    written: Any = None

    @property
    def numbers(self):
        """List of the float32 tensors that a step writes; None if nothing holds them.

        The variables, or their masters.
        """
        if not self.narrow:
            return self.variables
        return [n.kept for n in self.narrow] if self.keeps_numbers else None

    @property
    def keeps_numbers(self):
        """Whether there are masters that hold the float32 numbers of weights."""
        return bool(self.narrow) and self.narrow[0].kind.keeps_number


class Chunks:
    """Facts that fused steps reuse; see `Framework.chunked`.

    Attributes:
        items: List of `Chunk`s.
        most: The number of elements of the largest chunk.
        packs: `Packs` of the gradients.
        are_sharded: Bool. Whether there are shards among the tensors.
    """

    def __init__(self, kinds, targets, grads):
        self.are_sharded = any_sharded([*grads, *targets.variables])
        gradients = shards_of(grads)
        # `tensor_guards` guarantees it for plain gradients only.
        self._are_readable = not self.are_sharded and _are_readable(gradients)
        self.packs = Packs(gradients)
        # The tensors that others refer to, and all tensors that the step writes.
        found = [n for n in targets.weights if n is not None]
        kept = [n.kept for n in found if n.kept is not None]
        self._tensors = [] if targets.are_private else [*targets.variables, *kept]
        self._written = targets.written
        variables = shards_of(targets.variables)
        slots = [shards_of(of_one) for of_one in targets.slots]
        pairs = zip(variables, targets.weights, strict=True)
        narrow = [n and n.stored(v, shards_of) for v, n in pairs]
        kinds = [
            (kind, None if n is None else (n.kind, n.weight.dtype))
            for kind, n in zip(kinds, narrow, strict=True)
        ]
        sizes = list(map(torch.Tensor.numel, variables))
        limits = (_DEVICE_CHUNK, _DEVICE_CHUNK)
        if torch_measure.is_on_host(variables[0]):
            limits = (_HOST_CHUNK, SMALL)
        positions = _split(kinds, sizes, *limits)
        self.most = max(sum(sizes[i] for i in chunk) for chunk in positions)
        self.items = [
            Chunk(
                chunk,
                [variables[i] for i in chunk],
                list(map(list, zip(*(slots[i] for i in chunk), strict=True))),
                own := [narrow[i] for i in chunk if narrow[i] is not None],
                draws_of(own, [targets.variables[i] for i in chunk]),
            )
            for chunk in positions
        ]
        self._memory: Memory | None = None
        self._are_alike = _guards_of(shards_of(self._written))
        self._places = list(map(torch.Tensor.data_ptr, shards_of(self._tensors)))
        self._occupied = set(self._places) - {0}

    def holds(self):
        """Whether the tensors are as they were, which `tensor.data = ...` may change.

        Except for private tensors, such as slots, their addresses must be the same too.
        """
        tensors, written = self._tensors, self._written
        if self.are_sharded:
            tensors, written = shards_of(tensors), shards_of(written)
        are_in_place = list(map(torch.Tensor.data_ptr, tensors)) == self._places
        return are_in_place and self._are_alike(written)

    def memory(self):
        """Returns the `Memory` for a step on the host. A small one is reused."""
        memory = self._memory or Memory(self.items[0].variables[0], self.most)
        if self.most <= _KEPT_MEMORY:
            self._memory = memory
        return memory

    def readable(self, grads):
        """Returns gradients that kernels can read in the order of their memory.

        None of them aliases a tensor that the step writes.
        """
        if self._occupied and not self._occupied.isdisjoint(
            map(torch.Tensor.data_ptr, grads)
        ):
            grads = [g.clone() if g.data_ptr() in self._occupied else g for g in grads]
        if not (self._are_readable or _are_readable(grads)):
            grads = [g.contiguous().resolve_neg() for g in grads]
        return grads


def draws_of(narrow, variables):
    """Returns the `Draws` of a chunk, None if its weights draw no random bits."""
    return Draws(narrow, variables) if narrow and narrow[0].kind.draws else None


def _are_readable(tensors):
    """Whether all tensors are contiguous, and none has the negative bit.

    The imaginary part of a complex conjugate has that bit.
    """
    return all(map(torch.Tensor.is_contiguous, tensors)) and not any(
        map(torch.Tensor.is_neg, tensors)
    )


def _split(kinds, sizes, limit, alone):
    """Splits the positions into chunks of one kind, of at most `limit` elements.

    A tensor with more than `alone` elements gets its own chunk.
    """
    large: list[list[int]] = []
    by_kind: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        if sizes[i] > alone:
            large.append([i])
        else:
            by_kind.setdefault(kind, []).append(i)
    chunks: list[list[int]] = []
    for positions in by_kind.values():
        count: float = math.inf
        for i in positions:
            count += sizes[i]
            if count > limit:
                chunks.append([])
                count = sizes[i]
            chunks[-1].append(i)
    # In reverse: the cache still holds the gradients that were measured last.
    return [*large[::-1], *chunks[::-1]]
