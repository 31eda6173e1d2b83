"""`Targets`: the tensors that a fused step writes."""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso._backend.masters import KINDS, random_bits


class Narrow(NamedTuple):
    """A 16-bit weight, with the part that completes it to a float32 number."""

    kind: Any  # A `masters.Kind`.
    weight: Any  # The model's variable.
    kept: Any  # The variable that is kept with it, or None.
    position: int  # Among the optimizer's weights, for random bits of its own.
    shift: int = 0  # By how much these bits are shifted, to the right.

    def number(self, framework):
        """Returns the float32 number that a step begins with, a tensor."""
        kept = None if self.kept is None else framework.value_of(self.kept)
        weight = framework.value_of(self.weight)
        return self.kind.number(framework, weight, kept)

    def parts(self, framework, number, iterations):
        """Returns what to write after a step: tuples of a variable and a tensor."""
        bits = None
        if self.kind.draws:
            low = framework.value_of(self.weight)
            bits = random_bits(framework, low, self.position, iterations)
            if self.shift:
                bits = ops.right_shift(bits, self.shift)
        weight, kept = self.kind.parts(framework, number, self.weight.dtype, bits)
        written = [(self.weight, weight)]
        if self.kept is not None:
            written.append((self.kept, ops.cast(kept, self.kept.dtype)))
        return written


# Added to the position of a weight for its second rounding in a step, and twice or more
# for its slots: they draw other bits, since no optimizer has a weight there.
AGAIN = 2**24
# Slots are rounded stochastically. To the nearest, they would not decay: a step changes
# Adam's second moment by 1/1000, less than half of the last place.
SLOT_DTYPE, SLOT_KIND = "bfloat16", KINDS["stochastic"]


def draw_of_slot(position, number):
    """Returns the `position` and `shift` for a weight's slot with a number, from 0."""
    # A hash has the 16 bits that each of two slots takes.
    return position + (2 + number // 2) * AGAIN, 16 * (number % 2)


def is_narrow_slot(slot):
    """Whether a slot is rounded after each step."""
    return keras.backend.standardize_dtype(slot.dtype) == SLOT_DTYPE


def stored_narrow(narrow, weights, storage_of):
    """Returns a list of `Narrow` with what `storage_of` has for its variables."""
    # One call for all of them: there may be a thousand.
    kept = iter(storage_of([n.kept for n in narrow if n and n.kept is not None]))
    return [
        n and n._replace(weight=w, kept=None if n.kept is None else next(kept))
        for n, w in zip(narrow, weights, strict=True)
    ]


class Targets(NamedTuple):
    """The variables that an update writes: lists with an item for each gradient.

    The items are `keras.Variable`s or, if the backend `UPDATES_IN_PLACE`, the tensors
    that they hold.
    """

    variables: list  # In float32, and 16-bit weights.
    # A list of variables for each of `rule.slots`, in float32 or `SLOT_DTYPE`.
    slots: list
    # The `Narrow` of each 16-bit weight; None for variables trained as they are.
    narrow: list | None = None
    # The number of the step, from which random bits are drawn, with the positions of
    # the variables among the optimizer's.
    iterations: Any = None
    positions: Any = None
    # Whether the step may overwrite the gradients when it updates the variables.
    owns_gradients: bool = False
    # Whether only steps refer to the variables, as to slots: no autograd graph does.
    are_private: bool = False
    # The result of `Framework.chunked` for these.
    chunks: Any = None

    @property
    def again(self):
        """These variables for their second rounding in a step, which has other bits."""
        narrow = self.narrow and [
            n and n._replace(position=n.position + AGAIN) for n in self.narrow
        ]
        positions = [p + AGAIN for p in self.positions]
        return self._replace(slots=[], narrow=narrow, positions=positions)

    @property
    def weights(self):
        """List with the `Narrow` of each variable, or None where there is none."""
        return self.narrow or [None] * len(self.variables)

    @property
    def has_narrow_slots(self):
        """Bool. Whether there are slots that a step rounds."""
        return any(is_narrow_slot(column[0]) for column in self.slots if column)

    @property
    def draws(self):
        """Bool. Whether a step rounds at random."""
        return self.has_narrow_slots or any(n and n.kind.draws for n in self.weights)

    @property
    def are_float32(self):
        """Bool. Whether a step is in float32 for all variables."""
        pairs = zip(self.variables, self.weights, strict=True)
        dtype_of = keras.backend.standardize_dtype
        return all(n is not None or dtype_of(v.dtype) == "float32" for v, n in pairs)

    @property
    def in_place(self):
        """List of the `Narrow` weights with a number that a step changes in place."""
        return [n for n in self.weights if n is not None and n.kind.keeps_number]

    def numbers(self, framework):
        """Returns the float32 tensors that a step begins with, a list."""
        return [
            framework.value_of(variable) if n is None else n.number(framework)
            for variable, n in zip(self.variables, self.weights, strict=True)
        ]

    @property
    def states(self):
        """List of tuples `(variable, *slots)`."""
        return list(zip(self.variables, *self.slots, strict=True))

    @property
    def narrow_states(self):
        """As `states`, with the `Narrow` of each variable and slot that is rounded."""
        columns = [self.variables, *self.slots]
        if self.narrow is not None:
            pairs = zip(self.narrow, self.variables, strict=True)
            columns[0] = [v if n is None else n for n, v in pairs]
        for i, column in enumerate(self.slots):
            if column and is_narrow_slot(column[0]):
                pairs = zip(column, self.positions, strict=True)
                columns[i + 1] = [
                    Narrow(SLOT_KIND, slot, None, *draw_of_slot(p, i))
                    for slot, p in pairs
                ]
        return list(zip(*columns, strict=True))
