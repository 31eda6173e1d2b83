"""The optimizer in a checkpoint's graph of objects, which no TensorFlow need write.

`integration_tests/test_load_optimizer_state.py` reads those that TensorFlow wrote.
"""

import types

import keras
import pytest

from keras_lso.compat.backend import tf_checkpoint
from keras_lso.compat.tf_keras import checkpoints


@pytest.fixture
def read(monkeypatch):
    """`read(objects)`: the state in a graph of them, each described by a dict."""

    def read(*objects):
        values = [o.get("value") for o in objects]
        nodes = [
            tf_checkpoint.Node(
                i,
                o.get("children", {}),
                o.get("name", ""),
                str(i) if "value" in o else "",
                o.get("slots", []),
            )
            for i, o in enumerate(objects)
        ]
        graph = tf_checkpoint.Graph(nodes, lambda key: values[int(key)])
        monkeypatch.setattr(tf_checkpoint, "read", lambda prefix: graph)
        return checkpoints.read("ckpt", keras.optimizers.Adam())

    return read


def legacy(**children):
    """A checkpoint of TF 2.10; `children` are further ones of the root."""
    return [
        {"children": {"model": 1, "optimizer": 2, **children}},
        {"children": {"layer": 3}},
        {
            "children": {"iter": 6, "decay": 7, "learning_rate": 8},
            # In the order in which they were made, not in that of the variables.
            "slots": [("m", 5, 9), ("m", 4, 10)],
        },
        {"children": {"kernel": 4, "bias": 5}},
        {"name": "layer/kernel", "value": 40.0},
        {"name": "layer/bias", "value": 50.0},
        {"name": "Adam/iter", "value": 7},
        {"name": "Adam/decay", "value": 0.5},
        # A schedule, which has no value.
        {},
        {"name": "layer/bias/m", "value": 5.0},
        {"name": "layer/kernel/m", "value": 4.0},
    ]


def test_legacy_slots_are_read_in_order_of_variables(read):
    state = read(*legacy())
    assert state.slots == {"m": [("layer/kernel", 4.0), ("layer/bias", 5.0)]}
    assert (state.iterations, state.decay, state.is_legacy) == (7, 0.5, True)
    assert state.learning_rate is None
    assert state.loss_scale is None


def test_loss_scale_is_read_from_wrapper_above_optimizer(read):
    state = read(
        *legacy(wrapper=11),
        {"children": {"base_optimizer": 2, "loss_scale": 12}},
        {"children": {"current_loss_scale": 13, "good_steps": 14}},
        {"value": 64.0},
        {"value": 3},
    )
    assert (state.loss_scale, state.good_steps) == (64.0, 3)


def test_loss_scale_is_read_from_wrapper_that_is_optimizer(read):
    objects = legacy()
    objects[2]["children"]["loss_scale"] = 11
    state = read(*objects, {"children": {"current_loss_scale": 12}}, {"value": 64.0})
    assert (state.loss_scale, state.good_steps) == (64.0, None)


def test_numbered_variables_are_read_in_numeric_order(read):
    names = [f"Adam/{slot}/layer_{i}/kernel" for i in range(6) for slot in "mv"]
    numbers = {str(i): 3 + i for i in range(13)}
    state = read(
        {"children": {"optimizer": 1}},
        {"children": {"_iterations": 3, "_variables": 2}},
        # TensorFlow sorts them as strings.
        {"children": dict(sorted(numbers.items()))},
        {"name": "iteration", "value": 9},
        *({"name": name, "value": i} for i, name in enumerate(names)),
    )
    layers = [f"layer_{i}/kernel" for i in range(6)]
    assert state.slots == {
        "m": list(zip(layers, range(0, 12, 2), strict=True)),
        "v": list(zip(layers, range(1, 12, 2), strict=True)),
    }
    assert (state.iterations, state.is_legacy) == (9, False)


def test_checkpoint_with_two_optimizers_is_rejected(read):
    objects = legacy(other=11)
    other = {"children": objects[2]["children"]}
    with pytest.raises(ValueError, match=r"2 optimizers: \['optimizer', 'other'\]"):
        read(*objects, other)


def test_inconsistent_object_graph_is_reported_as_damaged(read):
    objects = legacy()
    objects[2]["children"]["iter"] = 99
    with pytest.raises(ValueError, match="damaged.*IndexError"):
        read(*objects)


def test_node_holds_fields_of_tensorflow_proto():
    made = types.SimpleNamespace
    proto = made(
        children=[made(local_name="kernel", node_id=4)],
        attributes=[
            made(name="OTHER", full_name="other", checkpoint_key="no"),
            made(name="VARIABLE_VALUE", full_name="dense/kernel", checkpoint_key="yes"),
        ],
        slot_variables=[
            made(
                slot_name="m",
                original_variable_node_id=4,
                slot_variable_node_id=5,
            )
        ],
    )
    assert tf_checkpoint._node(3, proto) == tf_checkpoint.Node(
        3, {"kernel": 4}, "dense/kernel", "yes", [("m", 4, 5)]
    )
