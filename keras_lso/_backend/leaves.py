"""`Leaves`: the tensors that a step reads as float32, and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import keras
from keras import ops

from keras_lso._backend.codecs import PLAIN, SLOT_CODECS, Codec, random_bits
from keras_lso._backend.tensors import Storage, Tensor

if TYPE_CHECKING:
    from keras_lso._backend.framework import Framework


class Leaf(NamedTuple):
    """A stored tensor, a weight or a slot, and how it holds a float32 number."""

    variable: Storage
    codec: Codec = PLAIN
    aux: Storage = None  # What the codec stores with it, or None.
    position: int = 0  # Among the optimizer's weights, for random bits of its own.
    shift: int = 0  # By how much these bits are shifted, to the right.

    def read(self, framework: Framework) -> Tensor:
        """Returns the number that a step begins with."""
        aux = None if self.aux is None else framework.value_of(self.aux)
        return self.codec.decode(framework, framework.value_of(self.variable), aux)

    def encoded(
        self, framework: Framework, master: Tensor, iterations: Any
    ) -> list[tuple[Storage, Tensor]]:
        """Returns what to write after a step."""
        # Without `iterations` the master is one value already: a variable's. A code
        # needs no scale of the same roundings.
        is_exact = self.aux is not None and self.codec.block == 1
        if is_exact and iterations is not None:
            master = framework.computed_once(master, iterations)
        bits = None
        if self.codec.is_random and iterations is not None:
            stored = framework.value_of(self.variable)
            bits = random_bits(framework, stored, self.position, iterations)
            if self.shift:
                bits = ops.right_shift(bits, self.shift)
        dtype = self.variable.dtype
        stored, aux = self.codec.encode(framework, master, dtype, bits)
        written = [(self.variable, stored)]
        if self.aux is not None:
            written.append((self.aux, ops.cast(aux, self.aux.dtype)))
        return written


# Added to the position of a weight for its second rounding in a step, and twice or more
# for its slots: they draw other bits, since no optimizer has a weight there.
AGAIN = 2**24


def draw_of_slot(position: int, number: int) -> tuple[int, int]:
    """Returns the `position` and `shift` for a weight's slot with a number, from 0."""
    # A hash has the 16 bits that each of two slots takes.
    return position + (2 + number // 2) * AGAIN, 16 * (number % 2)


def codec_of_slot(slot: Storage) -> Codec:
    """Returns the codec of a slot."""
    return SLOT_CODECS.get(keras.backend.standardize_dtype(slot.dtype), PLAIN)


class Leaves(NamedTuple):
    """The tensors that an update writes, as columns with an item for each gradient.

    The items are `keras.Variable`s or, if the backend `UPDATES_IN_PLACE`, the tensors
    that they hold.
    """

    variables: list  # The weights.
    # A list of variables for each of `rule.slots`, in float32 or as in `SLOT_CODECS`,
    # with None for a weight whose rule has only the first ones.
    slots: list
    has_gaps: bool = False  # Whether there is such a weight.
    # The codecs of the weights, with what these store. Empty if all are plain.
    codecs: Sequence[Codec] = ()
    aux: Sequence[Any] = ()
    # What the codecs of slots store with them, a list for each of `slots`, with None
    # where that is nothing. Empty if no slot has any.
    scales: Sequence[Sequence[Any]] = ()
    # The number of the step, where values are rounded: random bits are drawn from it,
    # with the positions of the variables among the optimizer's.
    iterations: Any = None
    positions: Any = None
    # Whether the step may overwrite the gradients when it updates the variables.
    owns_gradients: bool = False
    # Whether only steps refer to the variables, as to slots: no autograd graph does.
    are_private: bool = False
    # Whether PyTorch lays them out in memory like the gradients, as sums and averages.
    follow_gradients: bool = False
    # The result of `Framework.chunked` for these.
    chunks: Any = None

    @classmethod
    def of(cls, weights: list[Leaf], slots: list) -> Self:
        """Returns the columns of weights and of their slots."""
        variables, codecs, aux, positions, _ = map(list, zip(*weights, strict=True))
        if all(codec is PLAIN for codec in codecs):
            codecs = aux = []
        has_gaps = any(slot is None for column in slots for slot in column)
        return cls(variables, slots, has_gaps, codecs, aux, positions=positions)

    def mapped(self, function: Callable[[list], list]) -> Self:
        """Returns the leaves whose columns are the results of a function of lists."""

        def present(column: Sequence[Any]) -> Sequence[Any]:
            # One call for all of them: there may be a thousand.
            mapped = iter(function([v for v in column if v is not None]))
            return [None if v is None else next(mapped) for v in column]

        return self._replace(
            variables=function(self.variables),
            slots=list(map(present if self.has_gaps else function, self.slots)),
            aux=present(self.aux) if self.aux else self.aux,
            scales=list(map(present, self.scales)),
        )

    @property
    def for_second_rounding(self) -> Self:
        """The weights for another rounding in the same step, with other bits."""
        positions = [p + AGAIN for p in self.positions]
        return self._replace(slots=[], scales=[], positions=positions)

    @property
    def weights(self) -> list[Leaf]:
        """List of the weights."""
        columns = (
            self.codecs or repeat(PLAIN),
            self.aux or repeat(None),
            self.positions or repeat(0),
        )
        rows = zip(self.variables, *columns, strict=False)
        return [Leaf(*row) for row in rows]

    @property
    def rows(self) -> list[tuple[Leaf, ...]]:
        """List with the weight and its slots for each gradient."""
        columns: list[list[Leaf | None]] = [[*self.weights]]
        for i, slots in enumerate(self.slots):
            scales = self.scales[i] if self.scales else repeat(None)
            triples = zip(slots, scales, self.positions or repeat(0), strict=False)
            columns.append(
                [
                    None
                    if slot is None
                    else Leaf(slot, codec_of_slot(slot), aux, *draw_of_slot(place, i))
                    for slot, aux, place in triples
                ]
            )
        return [tuple(filter(None, row)) for row in zip(*columns, strict=True)]

    def decoded(self, framework: Framework) -> Self:
        """Returns plain leaves, of the tensors that a step begins with."""
        rows = [[leaf.read(framework) for leaf in row] for row in self.rows]
        variables, *slots = map(list, zip(*rows, strict=True))
        return self._replace(
            variables=variables, slots=slots, codecs=(), aux=(), scales=()
        )

    @property
    def states(self) -> list[tuple]:
        """List of tuples `(variable, *slots)`."""
        return list(zip(self.variables, *self.slots, strict=True))

    @property
    def rounds_slots(self) -> bool:
        """Whether there are slots that a step rounds."""
        slots = (column[0] for column in self.slots if column)
        return any(s is not None and codec_of_slot(s) is not PLAIN for s in slots)

    @property
    def are_random(self) -> bool:
        """Whether a step rounds at random."""
        return self.rounds_slots or any(codec.is_random for codec in self.codecs)

    @property
    def are_float32(self) -> bool:
        """Whether a step is in float32 for all weights."""
        dtype_of = keras.backend.standardize_dtype
        return all(
            codec is not PLAIN or dtype_of(variable.dtype) == "float32"
            for variable, codec, *_ in self.weights
        )

    @property
    def with_masters(self) -> list[Leaf]:
        """List of the weights whose master a step may change in place."""
        return [leaf for leaf in self.weights if leaf.codec.aux_is_master]

    def read(self, framework: Framework) -> list[Tensor]:
        """Returns the tensors that a step of the weights begins with."""
        return [leaf.read(framework) for leaf in self.weights]
