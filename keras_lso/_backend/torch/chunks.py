"""Which tensors an update on PyTorch steps together."""

import itertools
from typing import Any

import torch

from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.kernels import Memory
from keras_lso._backend.torch.masters import Draws
from keras_lso._backend.torch.measure import SMALL, Packs
from keras_lso._backend.torch.shards import shards_of

# The number of elements in a chunk, unless one tensor has more. At this size the cache
# still holds the results of one operation when the next reads them.
_HOST_CHUNK = 2**20
_DEVICE_CHUNK = 2**23
# In elements, 16 MiB. Up to this size, memory is kept between steps. An allocator sorts
# the memory that others have freed at the next request, which may take longer than a
# step.
_KEPT_MEMORY = 2**22


class Chunk:
    """The positions of tensors that are updated together, by one rule."""

    def __init__(self, positions):
        self.positions, self.draws, self.written = positions, None, None

    def of(self, items):
        """Returns the items of these tensors."""
        return list(map(items.__getitem__, self.positions))


class Chunks:
    """See `Framework.chunked`: `items` are `Chunk`s, and `packs` of the gradients."""

    def __init__(self, groups, targets):
        variables, weights = shards_of(targets.variables), targets.weights
        triples = zip(groups, variables, weights, strict=True)
        groups = [(g, None if n is None else (n.kind, v.dtype)) for g, v, n in triples]
        sizes = list(map(torch.Tensor.numel, variables))
        limits = (_DEVICE_CHUNK, _DEVICE_CHUNK)
        if torch_measure.is_on_host(variables[0]):
            limits = (_HOST_CHUNK, SMALL)
        self.items, draws = [], targets.draws
        for positions in _split(groups, sizes, *limits):
            chunk = Chunk(positions)
            if draws:
                columns = targets.positions, targets.variables, variables
                chunk.draws = Draws(*map(chunk.of, columns))
            self.items.append(chunk)
        self.packs = Packs(variables)
        self._most = max(sum(c.of(sizes)) for c in self.items)
        self._memory: Memory | None = None

    def memory(self, like):
        """Returns the `Memory` for a step on the host. A small one is reused."""
        memory = self._memory or Memory(like, self._most)
        if self._most <= _KEPT_MEMORY:
            self._memory = memory
        return memory


def _split(groups, sizes, limit, alone):
    """Splits positions into chunks of one group, of at most `limit` elements."""
    # A tensor with more than `alone` elements gets its own chunk.
    large: list[list[int]] = []
    small: dict[Any, list[int]] = {}
    for i, group in enumerate(groups):
        if sizes[i] > alone:
            large.append([i])
        else:
            small.setdefault(group, []).append(i)
    chunks = []
    for positions in small.values():
        # The number of the chunk in which each tensor ends.
        ends = itertools.accumulate(sizes[i] for i in positions)
        numbers = [end // limit for end in ends]
        pairs = itertools.groupby(zip(numbers, positions, strict=True), lambda p: p[0])
        chunks += [[i for _, i in of_one] for _, of_one in pairs]
    # In reverse: the cache still holds the gradients that were measured last.
    return [*large[::-1], *chunks[::-1]]
