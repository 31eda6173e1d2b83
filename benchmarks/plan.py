"""What is measured by default.

All of it takes 12 to 20 minutes on two cores, since XLA takes its time: 3 to 20 seconds
for each row of ResNet-50. So JAX and TensorFlow measure less on a CPU than
PyTorch; `--shapes`, `--inner` and `--kinds` ask for any other part.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Rows that are timed in turn: the same tensors, the same inner optimizer."""

    shapes: str
    inner: str
    kind: str


def _groups(shapes, kind, *inner):
    return [Group(shapes, name, kind) for name in inner]


_INNER = ("SGD", "SGD+momentum", "Adam", "AdamW", "LARS")
_CPU = {
    ("torch", "eager"): [
        *_groups("resnet50", "float32", *_INNER),
        *_groups("resnet50", "float16", "SGD+momentum", "Adam"),
        *_groups("bert-base", "float32", "AdamW"),
        *_groups("many-small", "float32", "SGD+momentum", "Adam"),
    ],
    ("jax", "jit"): [
        *_groups("resnet50", "float32", *_INNER[1:]),
        *_groups("resnet50", "float16", "SGD+momentum"),
        *_groups("bert-base", "float32", "AdamW"),
        *_groups("many-small", "float32", "SGD+momentum"),
    ],
    ("tensorflow", "graph"): [
        *_groups("resnet50", "float32", "SGD+momentum", "Adam", "LARS"),
        *_groups("resnet50", "float16", "SGD+momentum"),
        *_groups("many-small", "float32", "SGD+momentum"),
    ],
    ("tensorflow", "XLA"): [
        *_groups("resnet50", "float32", "SGD+momentum", "Adam", "LARS"),
    ],
}
_GPU = [
    *_groups("resnet50", "float32", *_INNER),
    *_groups("bert-base", "float32", *_INNER[1:]),
    *_groups("bert-base", "float16", "SGD+momentum", "AdamW"),
    *_groups("many-small", "float32", "SGD+momentum", "Adam"),
]
_OF_MASTERS = ["SGD+momentum", "Adam", "Lion", "LARS", "LAMB", "NovoGrad"]
_SLOW_PEERS = {
    "optax + jmp": _groups("resnet50", "float32", "SGD+momentum"),
}
"""Peers that take half a minute to compile: the groups in which they are measured."""


def default_groups(backend, mode, on_gpu):
    """Returns the groups that are measured when nothing else is asked for."""
    return _GPU if on_gpu else _CPU[backend, mode]


def chosen_groups(shapes, inner, kinds):
    """Returns a group for each combination."""
    return [Group(s, i, k) for s in shapes for k in kinds for i in inner]


def masters_groups(backend, inner):
    """Returns pairs of a dtype and an inner optimizer, of some or by default."""
    of_bfloat16 = inner or (_OF_MASTERS if backend == "torch" else ["Adam"])
    of_float16 = inner or ["Adam"]
    pairs = [("bfloat16", name) for name in of_bfloat16]
    return pairs + [("float16", name) for name in of_float16]


def is_measured(peer, group):
    """Whether a peer is measured in a group, unless `--slow-peers` asks for all."""
    return group.shapes == "tiny" or group in _SLOW_PEERS.get(peer, [group])
