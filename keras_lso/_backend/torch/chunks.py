"""What the fused step on PyTorch decides once: which tensors form a chunk, and where.

To ask a thousand tensors about themselves, in Python, takes longer than to update them.
"""

import itertools
import math
import operator
from typing import Any, NamedTuple

import torch

from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.kernels import Memory
from keras_lso._backend.torch.measure import SMALL, Packs
from keras_lso._backend.torch.shard_checks import FSDP_MODULES
from keras_lso._backend.torch.shards import any_sharded, shards_of

# The number of elements in a chunk, unless one tensor has more: the cache still holds
# what one operation has written when the next reads it.
_HOST_CHUNK = 2**20
_DEVICE_CHUNK = 2**23
# Elements, 16 MiB. What an allocator has been given back by others, it sorts when it is
# asked again: that may take longer than a step.
_KEPT_MEMORY = 2**22

_dtype, _shape = map(operator.attrgetter, ("dtype", "shape"))


def context_guards():
    """With the modules that FSDP has sharded; see `Framework.context_guards`."""
    if torch.compiler.is_compiling():
        return None
    return set(map(id, FSDP_MODULES))


def gradient_guards(grads):
    """By getters in C, one after the other; see `Framework.gradient_guards`.

    Without devices: PyTorch refuses tensors of two before anything is written.
    """
    try:
        layouts = list(map(torch.Tensor.is_contiguous, grads))
    except RuntimeError:  # Not each sparse layout says so.
        layouts = [False] * len(grads)
    if not all(layouts):
        # A sparse tensor may say that it has gaps, as a dense one does.
        layouts = [known or g.layout for known, g in zip(layouts, grads, strict=True)]
    signs = map(torch.Tensor.is_neg, grads)
    return [*map(_dtype, grads), *map(_shape, grads), *layouts, *signs]


class Chunk(NamedTuple):
    """Tensors that are updated together, by one rule.

    Attributes:
        are_wide: Bool. Whether their gradients are all in float32.
        positions: List of ints, where they stand among all.
        variables: List of tensors.
        slots: List of lists of tensors, one for each slot of the rule.
        pairs: List of tuples of tensors, a master and its low-precision variable.
    """

    are_wide: bool
    positions: list[int]
    variables: list
    slots: list
    pairs: list


class Chunks:
    """What a fused step need not find out again; see `Framework.chunked`.

    Attributes:
        items: List of `Chunk`s.
        most: The number of elements of the largest chunk.
        packs: `Packs` of the gradients.
        are_sharded: Bool. Whether there are shards among the tensors.
        launches: Dict by the first position of a chunk, of what `triton.steps.decide`
            has found out.
    """

    def __init__(self, kinds, targets, grads):
        self.are_sharded = any_sharded([*grads, *targets.variables])
        gradients = shards_of(grads)
        # `gradient_guards` says so of plain gradients alone.
        self._are_readable = not self.are_sharded and _are_readable(gradients)
        self.packs = Packs(gradients)
        low = shards_of([c for c in targets.copies or () if c is not None])
        self._tensors = [*targets.variables, *low]
        self._private = list(itertools.chain(*targets.slots))
        if targets.are_private:
            self._tensors, self._private = [], self._tensors
        variables = shards_of(targets.variables)
        slots = [shards_of(of_one) for of_one in targets.slots]
        copies = shards_of(targets.copies or [None] * len(variables))
        kinds = [
            (kind, None if copy is None else copy.dtype)
            for kind, copy in zip(kinds, copies, strict=True)
        ]
        sizes = list(map(torch.Tensor.numel, variables))
        limits = (_DEVICE_CHUNK, _DEVICE_CHUNK)
        if torch_measure.is_on_host(variables[0]):
            limits = (_HOST_CHUNK, SMALL)
        positions = _split(kinds, sizes, *limits)
        self.most = max(sum(sizes[i] for i in chunk) for chunk in positions)
        self.items = [
            Chunk(
                {gradients[i].dtype for i in chunk} == {torch.float32},
                chunk,
                [variables[i] for i in chunk],
                list(map(list, zip(*(slots[i] for i in chunk), strict=True))),
                [(variables[i], copies[i]) for i in chunk if copies[i] is not None],
            )
            for chunk in positions
        ]
        self.launches: dict[int, Any] = {}
        self._memory: Memory | None = None
        self._facts = self._where()
        self._written = set(self._facts[0]) - {0}

    def holds(self):
        """Whether the tensors are still where they were."""
        return self._where() == self._facts

    def _where(self):
        """Returns what an assignment to `tensor.data` changes.

        Of what is private, as slots are, only whether a kernel can read it.
        """
        local, private = self._tensors, self._private
        if self.are_sharded:
            local, private = shards_of(local), shards_of(private)
        return (
            list(map(torch.Tensor.data_ptr, local)),
            list(map(torch.Tensor.is_contiguous, local)),
            all(map(torch.Tensor.is_contiguous, private)),
        )

    def memory(self):
        """Returns the `Memory` for a step on the host, the same each time if small."""
        memory = self._memory or Memory(self.items[0].variables[0], self.most)
        if self.most <= _KEPT_MEMORY:
            self._memory = memory
        return memory

    def readable(self, grads):
        """Returns gradients that kernels read as they are in memory, in their order.

        None of them aliases what is written.
        """
        if self._written and not self._written.isdisjoint(
            map(torch.Tensor.data_ptr, grads)
        ):
            grads = [g.clone() if g.data_ptr() in self._written else g for g in grads]
        if not (self._are_readable or _are_readable(grads)):
            grads = [g.contiguous().resolve_neg() for g in grads]
        return grads


def _are_readable(tensors):
    """Whether tensors have no gaps, and hold no negatives of what they are.

    The imaginary part of a complex conjugate is such a negative.
    """
    return all(map(torch.Tensor.is_contiguous, tensors)) and not any(
        map(torch.Tensor.is_neg, tensors)
    )


def _split(kinds, sizes, limit, alone):
    """Splits the positions into chunks of one kind, of at most `limit` elements.

    A tensor with more elements than `alone` has a chunk to itself.
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
    # The last first: the cache still holds the gradients that were measured last.
    return [*large[::-1], *chunks[::-1]]
