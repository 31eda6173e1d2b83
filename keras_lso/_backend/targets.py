"""`Targets`: the tensors that a fused step writes."""

from typing import Any, NamedTuple


class Targets(NamedTuple):
    """What a fused step writes: lists with an item for each gradient.

    The items are `keras.Variable`s; where the backend `UPDATES_IN_PLACE`, the tensors
    that they hold.

    Attributes:
        variables: List of float32 variables.
        slots: List of tuples of variables, in the order of `rule.slots`.
        copies: List of the model's low-precision copy of each master, or None for what
            is no master. If the copy no longer equals the rounded master (it was
            assigned externally), the step re-initialises the master from it. Afterwards
            it sets the copy to the rounded new master. Defaults to `None`: there are no
            masters.
        owns_gradients: Bool. Whether the gradients are the step's own, which it may
            write where it updates the variables. Defaults to `False`.
        are_private: Bool. Whether only steps refer to the variables, as to slots, and
            neither a gradient nor a graph of autograd does. Defaults to `False`.
        chunks: What `Framework.chunked` returned for these. Defaults to `None`.
    """

    variables: list
    slots: list
    copies: list | None = None
    owns_gradients: bool = False
    are_private: bool = False
    chunks: Any = None

    @property
    def masters(self):
        """List of tuples `(master, copy)`, of those variables that have a copy."""
        pairs = zip(self.variables, self.copies or (), strict=self.copies is not None)
        return [(master, copy) for master, copy in pairs if copy is not None]

    @property
    def states(self):
        """List of tuples `(variable, *slots)`."""
        pairs = zip(self.variables, self.slots, strict=True)
        return [(variable, *slots) for variable, slots in pairs]
