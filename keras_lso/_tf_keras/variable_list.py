"""`VariableList`: variables as Keras 3 lists them, and as tf.keras returned them."""

from keras_lso._backend import backend
from keras_lso._keras_internals.variables import register_tree_node


@register_tree_node
class VariableList(list):
    """The variables of an optimizer, a list that can be called.

    In Keras 3 `optimizer.variables` is a list. In tf.keras `optimizer.variables()` is
    a call, whose list has the step count and the slots, but neither the learning rate
    nor the loss scale: code that sets all of them to zero starts afresh.

    Args:
        variables: Iterable of variables.
        called: Callable that returns the variables which a call returns. Defaults to
            `None`: all.
    """

    def __init__(self, variables=(), called=None):
        super().__init__(variables)
        self._called = called

    def __call__(self):
        """Returns the variables that tf.keras's method of the name returned."""
        return list(self if self._called is None else self._called())

    def __reduce__(self):
        """Copies and pickles the variables, without the optimizer behind them."""
        positions = {id(v): i for i, v in enumerate(self)}
        return _from_positions, (
            list(self),
            [positions[id(v)] for v in self() if id(v) in positions],
        )

    # --- A list among nested structures: `keras.tree`, with optree and with torch ---

    def tree_flatten(self):
        """Returns the items, as `optree` and `torch` want them."""
        return list(self), None

    @classmethod
    def tree_unflatten(cls, metadata, children):
        """Returns a list of `children`."""
        return cls(children)

    torchtree_flatten = tree_flatten

    @classmethod
    def torchtree_unflatten(cls, children, metadata):
        """Returns a list of `children`."""
        return cls(children)

    def torchtree_flatten_with_keys(self):
        """Returns the items with their positions, as `torch` wants them."""
        return backend.with_positions(list(self)), None


def _from_positions(variables, called):
    return VariableList(variables, called=lambda: [variables[i] for i in called])


backend.register_list_class(VariableList)
