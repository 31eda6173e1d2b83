"""The optimizer state in TensorFlow's checkpoints and SavedModels.

It is apart from `files.py` because the state in these files is part of a graph of
objects, in which the optimizer must be found first.
"""

import os

import keras

from keras_lso.compat.backend import tf_checkpoint
from keras_lso.compat.tf_keras.state import SavedState, split_name

# Children of a layer in a SavedModel that are not its attributes.
_LISTS = {"variables", "trainable_variables", "regularization_losses", "keras_api"}


def is_prefix(path: str) -> bool:
    """Whether `path` is the prefix of a checkpoint, or its index file."""
    return os.path.isfile(path.removesuffix(".index") + ".index")


def read(path: str, optimizer: keras.optimizers.Optimizer) -> SavedState:
    """Returns the `SavedState` of the one optimizer in a checkpoint.

    `path` is the folder of a SavedModel or of checkpoints, or a checkpoint's prefix.
    The class of the Keras 3 `optimizer` determines the names of the slots.
    """
    graph = tf_checkpoint.read(_prefix(path))
    try:
        return _read_graph(graph, optimizer)
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(
            "The checkpoint is damaged: its graph of objects does not fit together "
            f"({type(error).__name__}: {error})."
        ) from error


def _prefix(path):
    if not os.path.isdir(path):
        return path.removesuffix(".index")
    models = [os.path.join(path, f"saved_model.{ending}") for ending in ("pb", "pbtxt")]
    if any(map(os.path.isfile, models)):
        prefix: str | None = os.path.join(path, "variables", "variables")
    else:
        prefix = tf_checkpoint.latest(path)
    if prefix is None or not is_prefix(prefix):
        raise ValueError(
            "The folder holds neither a SavedModel nor a checkpoint with its index "
            "and its `checkpoint` file."
        )
    return prefix


def _read_graph(graph, optimizer):
    node = _find_optimizer(graph)
    is_legacy = _is_legacy(node)

    def value(name, legacy_name):
        return graph.value(node.children.get(legacy_name if is_legacy else name))

    iterations = value("_iterations", "iter")
    if iterations is None:
        raise ValueError("The file holds an optimizer, but not its iterations.")
    read_slots = _legacy_slots if is_legacy else _listed_slots
    scale = _loss_scale_children(graph, node)
    return SavedState(
        iterations=iterations,
        slots=read_slots(graph, node, optimizer),
        is_legacy=is_legacy,
        learning_rate=value("_learning_rate", "learning_rate"),
        decay=float(value(None, "decay") or 0.0),
        u_product=value("_u_product", "momentum_cache"),
        loss_scale=graph.value(scale.get("current_loss_scale")),
        good_steps=graph.value(scale.get("good_steps")),
    )


# --- The optimizer in the graph of objects ----------------------------------


def _find_optimizer(graph):
    """Returns the node of the optimizer. There must be exactly one."""
    found = [node for node in graph.nodes if _is_new(node) or _is_legacy(node)]
    if not found:
        raise ValueError(
            "The file holds no optimizer state. `model.save` and `model.save_weights` "
            "write that of a compiled model, and `tf.train.Checkpoint` of what it is "
            "given: `tf.train.Checkpoint(model=model, optimizer=optimizer)`."
        )
    if len(found) > 1:
        raise ValueError(
            f"The file holds the state of {len(found)} optimizers: "
            f"{[graph.path(node) for node in found]}. Write one with a single "
            "optimizer: `tf.train.Checkpoint(model=model, optimizer=optimizer)`."
        )
    [node] = found
    if "_trainable_variables" in node.children:
        raise ValueError(
            "The file was written by Keras 3, not by tf.keras 2. Restore it with "
            "`tf.train.Checkpoint` into the same objects."
        )
    return node


def _is_new(node):
    return {"_iterations", "_variables"} <= node.children.keys()


def _is_legacy(node):
    return bool(node.slots) or {"iter", "decay"} <= node.children.keys()


def _loss_scale_children(graph, node):
    """Returns the children of the loss scale's node, or {} if there is no such node."""
    # One node is both wrapper and optimizer; in TF 2.2 the wrapper was the parent.
    for owner in graph.nodes:
        if owner is node or owner.children.get("base_optimizer") == node.index:
            index = owner.children.get("loss_scale")
            if index is not None:
                return graph.nodes[index].children
    return {}


# --- Its slots --------------------------------------------------------------


def _legacy_slots(graph, node, optimizer):
    """Returns the slots of a class from before TF 2.11, which the graph names."""
    found: dict[str, dict] = {}
    for slot, variable, slot_variable in node.slots:
        found.setdefault(slot, {})[variable] = slot_variable
    # The graph lists the slots in the order of a breadth-first search.
    order = {index: i for i, index in enumerate(_variables_in_order(graph))}
    return {
        slot: [
            (graph.nodes[v].name or None, graph.value(by_variable[v]))
            for v in sorted(by_variable, key=lambda v: order.get(v, len(order)))
        ]
        for slot, by_variable in found.items()
    }


def _listed_slots(graph, node, optimizer):
    """Returns the slots of a class of TF 2.11 or newer, which lists named variables."""
    listed = graph.nodes[node.children["_variables"]].children
    slots: dict[str, list] = {}
    for position in sorted(listed, key=int):
        variable = graph.nodes[listed[position]]
        if variable.index != node.children["_iterations"]:
            slot, name = split_name(variable.name, optimizer)
            slots.setdefault(slot, []).append((name, graph.value(variable.index)))
    return slots


def _variables_in_order(graph):
    """Returns the indices of the variables, layer by layer, as a model lists them."""
    order: dict[int, None] = {}
    seen = set()

    def visit(node):
        if node.index in seen or _is_new(node) or _is_legacy(node):
            return
        seen.add(node.index)
        children = [i for name, i in node.children.items() if name not in _LISTS]
        # A layer lists its own variables before those of the layers in it.
        order.update(dict.fromkeys(i for i in children if graph.nodes[i].key))
        for index in children:
            visit(graph.nodes[index])

    visit(graph.nodes[0])
    return list(order)
