"""`VariableList`: the type of `optimizer.variables`, for both Keras 3 and tf.keras."""

from collections.abc import Callable, Iterable
from typing import Any, Self

import keras

from keras_lso._backend import backend
from keras_lso._keras_internals.variables import register_tree_node


@register_tree_node
class VariableList(list[keras.Variable]):
    """The variables of an optimizer, a callable list.

    In Keras 3 `optimizer.variables` is a list. In tf.keras `optimizer.variables()`
    returns the step count and the slots, but neither the learning rate nor the loss
    scale: code that sets them all to zero re-initialises the optimizer. A call of this
    list returns the result of `called`; without it, all variables.
    """

    def __init__(
        self,
        variables: Iterable[keras.Variable] = (),
        called: Callable[[], list[keras.Variable]] | None = None,
    ) -> None:
        super().__init__(variables)
        self._called = called

    def __call__(self) -> list[keras.Variable]:
        """Returns the variables that `variables()` of tf.keras returned."""
        return list(self if self._called is None else self._called())

    def __reduce__(self) -> Any:
        """Copies and pickles the variables without a reference to the optimizer."""
        positions = {id(v): i for i, v in enumerate(self)}
        return _from_positions, (
            list(self),
            [positions[id(v)] for v in self() if id(v) in positions],
        )

    # --- The protocol of `keras.tree`, with `optree` and with torch ---------------

    def tree_flatten(self) -> tuple[list[Any], None]:
        return list(self), None

    @classmethod
    def tree_unflatten(cls, metadata: Any, children: Any) -> Self:
        return cls(children)

    torchtree_flatten = tree_flatten

    @classmethod
    def torchtree_unflatten(cls, children: Any, metadata: Any) -> Self:
        return cls(children)


def _from_positions(variables, called):
    return VariableList(variables, called=lambda: [variables[i] for i in called])


backend.host.register_list_class(VariableList)
