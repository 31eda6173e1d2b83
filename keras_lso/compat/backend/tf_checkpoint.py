"""Reading TensorFlow's checkpoints, under any backend of Keras.

The functions import TensorFlow, so that this module can be imported without it.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclasses.dataclass
class Node:
    """A saved object.

    Attributes:
        index: Int, its position in `Graph.nodes`.
        children: Dict of the names of its attributes to the indices of their nodes.
        name: String, the name of a variable; empty if the object is no variable.
        key: String, the key of the stored value; empty if there is no value.
        slots: List of `(slot name, index of the variable, index of the slot)`.
    """

    index: int
    children: dict[str, int]
    name: str
    key: str
    slots: list[Any]


class Graph:
    """The objects in a checkpoint; the first is the one whose `save` was called."""

    def __init__(
        self, nodes: Sequence[Node], read_value: Callable[[str], NDArray[Any]]
    ) -> None:
        self.nodes = nodes
        self._read_value = read_value

    def value(self, index: int | None) -> NDArray[Any] | None:
        """Returns the array of a variable; None for `None` and other objects."""
        if index is None or not self.nodes[index].key:
            return None
        return self._read_value(self.nodes[index].key)

    def path(self, node: Node) -> str:
        """Returns the shortest path of attributes that leads to a node."""
        paths = {0: ""}
        queue = collections.deque([0])
        while queue:
            index = queue.popleft()
            for name, child in self.nodes[index].children.items():
                if child not in paths:
                    paths[child] = f"{paths[index]}.{name}".lstrip(".")
                    queue.append(child)
        return paths.get(node.index, "") or "(root)"


def latest(folder: str) -> str | None:
    """Returns the prefix of the latest checkpoint in a folder; None if it has none."""
    return _import_tensorflow().train.latest_checkpoint(folder)


def read(prefix: str) -> Graph:
    """Returns the `Graph` of a checkpoint.

    Args:
        prefix: The path without `.index`.
    """
    tf = _import_tensorflow()
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    def read_value(key):
        with _refusing_damage():
            return reader.get_tensor(key)

    with _refusing_damage():
        reader = tf.train.load_checkpoint(prefix)
        is_object_based = reader.has_tensor(_GRAPH)
    if not is_object_based:
        raise ValueError(
            "The checkpoint was written by `tf.compat.v1.train.Saver`, which stores "
            "names only. Write one with `tf.train.Checkpoint`."
        )
    proto = trackable_object_graph_pb2.TrackableObjectGraph()
    try:
        proto.ParseFromString(read_value(_GRAPH))
    # `DecodeError` of protobuf, which has no type hints of its own.
    except Exception as error:
        raise ValueError(
            f"The checkpoint is damaged: its graph of objects cannot be read ({error})."
        ) from error
    return Graph([_node(i, n) for i, n in enumerate(proto.nodes)], read_value)


@contextlib.contextmanager
def _refusing_damage():
    try:
        yield
    # The class of TensorFlow's error depends on the damage.
    except Exception as error:
        raise ValueError(
            f"The checkpoint is damaged or incomplete ({error})."
        ) from error


def _node(index, proto):
    values = [a for a in proto.attributes if a.name == "VARIABLE_VALUE"]
    return Node(
        index=index,
        children={child.local_name: child.node_id for child in proto.children},
        name=values[0].full_name if values else "",
        key=values[0].checkpoint_key if values else "",
        slots=[
            (s.slot_name, s.original_variable_node_id, s.slot_variable_node_id)
            for s in proto.slot_variables
        ],
    )


def _import_tensorflow():
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "Reading a SavedModel or a checkpoint needs TensorFlow, whatever the "
            "backend of Keras is: `pip install tensorflow`. Or save the model as "
            "`.h5` in tf.keras, which holds all but the loss scale."
        ) from error
    return tf
