"""What the fused step on PyTorch decides once: which tensors form a chunk, and where.

To ask a thousand tensors about themselves, in Python, takes longer than to update them.
"""

import itertools
import math
import operator
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import TensorGuards

from keras_lso._backend.masters import PLACES, WEIGHTS, int32
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.kernels import Memory
from keras_lso._backend.torch.measure import PLAIN, SMALL, Packs
from keras_lso._backend.torch.shard_checks import FSDP_MODULES
from keras_lso._backend.torch.shards import any_sharded, first_place, shards_of
from keras_lso._backend.torch.triton.addresses import Numbers, stream_of

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


def tensor_guards(grads):
    """See `Framework.tensor_guards`."""
    return _guards_of(grads)


def _guards_of(tensors):
    """Returns a callable: are other tensors like these, apart from their values?

    Like these in dtype, shape and layout, and in whether they hold negatives of what
    they are. The guards of `torch.compile` see that in one call, a sixth of the time
    that getters of each take. They do not know sparse tensors and shards.
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
    except RuntimeError:  # Not each sparse layout says so.
        layouts = [False] * len(tensors)
    if not all(layouts):
        # A sparse tensor may say that it has gaps, as a dense one does.
        layouts = [known or t.layout for known, t in zip(layouts, tensors, strict=True)]
    signs = map(torch.Tensor.is_neg, tensors)
    return [*map(_dtype, tensors), *map(_shape, tensors), *layouts, *signs]


class Draws:
    """What random bits depend on, other than the step; see `masters.random_bits`.

    Args:
        narrow: List of the `Narrow` weights of a chunk.
        variables: List of the tensors whose shards they are, or they themselves.

    Attributes:
        positions: List of ints, those of the weights among those of the optimizer.
        places: List of ints, where the first element of each is in the whole tensor.
        size: Int, the number of all elements.
    """

    def __init__(self, narrow, variables):
        self.positions = [n.position for n in narrow]
        self.places = list(map(first_place, variables))
        sizes = [n.weight.numel() for n in narrow]
        *starts, self.size = itertools.accumulate(sizes, initial=0)
        pairs = zip(self.places, starts, strict=True)
        self._keys = [
            *(int32(position * WEIGHTS) for position in self.positions),
            *(int32((place - start) * PLACES) for place, start in pairs),
            *sizes,
        ]
        self._device = narrow[0].weight.device
        self._numbers = Numbers(self._device)

    def on_device(self):
        """Returns three int32 tensors with an item for each weight.

        - What its position adds to the number of the step.
        - What it adds to the places of the elements in the chunk.
        - The number of its elements.
        """
        keys, _ = self._numbers.on_device(self._keys, stream_of(self._device))
        return keys.to(torch.int32).view(3, -1).unbind()


class Chunk(NamedTuple):
    """Tensors that are updated together, by one rule.

    Attributes:
        are_wide: Bool. Whether their gradients are all in float32.
        positions: List of ints, where they stand among all.
        variables: List of tensors: float32 ones, or weights of 16 bits.
        slots: List of lists of tensors, one for each slot of the rule.
        narrow: List of the `Narrow` weights that the variables are, empty if they are
            none. They are of one kind and dtype.
        draws: `Draws` of the random bits for `narrow`; None if their kind draws none.
    """

    are_wide: bool
    positions: list[int]
    variables: list
    slots: list
    narrow: list
    draws: Draws | None = None

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
        # `tensor_guards` says so of plain gradients alone.
        self._are_readable = not self.are_sharded and _are_readable(gradients)
        self.packs = Packs(gradients)
        # What others refer to, and all that the step writes.
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
                {gradients[i].dtype for i in chunk} == {torch.float32},
                chunk,
                [variables[i] for i in chunk],
                list(map(list, zip(*(slots[i] for i in chunk), strict=True))),
                own := [narrow[i] for i in chunk if narrow[i] is not None],
                draws_of(own, [targets.variables[i] for i in chunk]),
            )
            for chunk in positions
        ]
        self.launches: dict[int, Any] = {}
        self._memory: Memory | None = None
        self._are_alike = _guards_of(shards_of(self._written))
        self._places = list(map(torch.Tensor.data_ptr, shards_of(self._tensors)))
        self._occupied = set(self._places) - {0}

    def holds(self):
        """Whether the tensors are as they were, which `tensor.data = ...` changes.

        Also where they were, but for private ones, as slots are.
        """
        tensors, written = self._tensors, self._written
        if self.are_sharded:
            tensors, written = shards_of(tensors), shards_of(written)
        are_in_place = list(map(torch.Tensor.data_ptr, tensors)) == self._places
        return are_in_place and self._are_alike(written)

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
