"""`Targets`: the tensors that a fused step writes."""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso._backend.masters import random_bits


class Narrow(NamedTuple):
    """A 16-bit weight, with the part that completes it to a float32 number.

    Attributes:
        kind: A `masters.Kind`.
        weight: The model's float16 or bfloat16 variable.
        kept: The variable that is kept with it, or None.
        position: Int, the position of the weight among the optimizer's weights, by
            which its random bits differ from those of others.
    """

    kind: Any
    weight: Any
    kept: Any
    position: int

    @property
    def again(self):
        """This weight for its second rounding in a step, which draws bits of its own.

        No optimizer has a weight at that position.
        """
        return self._replace(position=self.position + 2**24)

    def stored(self, weight, storage_of):
        """Returns this weight with the values of variables in place of the variables.

        Args:
            weight: The value that the variable of the weight holds.
            storage_of: Callable that takes a list of variables and returns the values
                that they hold.
        """
        kept = None if self.kept is None else storage_of([self.kept])[0]
        return self._replace(weight=weight, kept=kept)

    def number(self, framework):
        """Returns the float32 number that a step begins with, a tensor."""
        kept = None if self.kept is None else ops.convert_to_tensor(self.kept)
        weight = ops.convert_to_tensor(self.weight)
        return self.kind.number(framework, weight, kept)

    def parts(self, framework, number, iterations):
        """Returns the values to write after a step: tuples of a variable and a tensor.

        Args:
            framework: `Framework`.
            number: Float32 tensor, the number after the step.
            iterations: Integer scalar tensor, the number of the step. None if the kind
                draws no random bits.
        """
        bits = None
        if self.kind.draws:
            low = ops.convert_to_tensor(self.weight)
            bits = random_bits(framework, low, self.position, iterations)
        weight, kept = self.kind.parts(framework, number, self.weight.dtype, bits)
        written = [(self.weight, weight)]
        return written if self.kept is None else [*written, (self.kept, kept)]


class Targets(NamedTuple):
    """The variables that an update writes: lists with an item for each gradient.

    The items are `keras.Variable`s or, if the backend `UPDATES_IN_PLACE`, the tensors
    that they hold.

    Attributes:
        variables: List of float32 variables and 16-bit weights.
        slots: List of lists of variables, one for each of `rule.slots`.
        narrow: List with the `Narrow` of each 16-bit weight, and None for a variable
            that is trained as it is. Defaults to `None`: all are trained as they are.
        iterations: The variable with the number of the step, from which some kinds of
            masters draw random bits. Defaults to `None`: no kind draws any.
        owns_gradients: Bool. Whether the gradients are the step's own, so that it may
            overwrite them when it updates the variables. Defaults to `False`.
        are_private: Bool. Whether only steps refer to the variables, as they do to
            slots, and no gradient or autograd graph does. Defaults to `False`.
        chunks: The result of `Framework.chunked` for these. Defaults to `None`.
    """

    variables: list
    slots: list
    narrow: list | None = None
    iterations: Any = None
    owns_gradients: bool = False
    are_private: bool = False
    chunks: Any = None

    @property
    def weights(self):
        """List with the `Narrow` of each variable, or None where there is none."""
        return self.narrow or [None] * len(self.variables)

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
            ops.convert_to_tensor(variable) if n is None else n.number(framework)
            for variable, n in zip(self.variables, self.weights, strict=True)
        ]

    @property
    def states(self):
        """List of tuples `(variable, *slots)`."""
        return list(zip(self.variables, *self.slots, strict=True))
