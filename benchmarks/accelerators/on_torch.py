"""The bytes and the kernels of an eager step on PyTorch, off the CPU."""

from unittest import mock

import keras
import torch

import keras_lso
from benchmarks import peers_torch
from benchmarks.accelerators.meta import (
    Kernels,
    RefuseNumbers,
    as_accelerator,
    compiling,
)
from benchmarks.bytes_moved import bytes_of_step
from benchmarks.host import Recipe
from benchmarks.shapes import SHAPES, parameters

RECIPES = (
    Recipe("SGD", "SGD"),
    Recipe("SGD+momentum", "SGD+momentum"),
    Recipe("Adam", "Adam"),
    Recipe("AdamW", "AdamW"),
    Recipe("AdamW, clipped", "AdamW", clip_norm=1.0),
    Recipe("LARS", "LARS"),
    Recipe("SGD+momentum, float16", "SGD+momentum", kind="float16"),
    Recipe("Adam, float16", "Adam", kind="float16"),
    Recipe("LARS, float16", "LARS", kind="float16"),
    *(
        Recipe(f"{inner}, {kind}, {masters}", inner, kind=kind, masters=masters)
        for masters in ("remainder", "remainder8", "stochastic")
        for kind in ("bfloat16", "float16")
        for inner in ("SGD+momentum", "Adam")
    ),
    Recipe("Adam, bfloat16 slots", "Adam", slots="bfloat16"),
    Recipe(
        "Adam, bfloat16, stochastic, bfloat16 slots",
        "Adam",
        kind="bfloat16",
        masters="stochastic",
        slots="bfloat16",
    ),
)


class MetaTensors:
    """As `rows_torch.Tensors`, without values."""

    def __init__(self, shapes, kind):
        self._shapes, self.dtype = SHAPES[shapes](), getattr(torch, kind)
        self.gradients = self._empty(self.dtype)

    def _empty(self, dtype):
        return [torch.empty(s, dtype=dtype, device="meta") for s in self._shapes]

    def weights(self):
        return self._empty(torch.float32)

    def variables(self):
        dtype = keras.backend.standardize_dtype(self.dtype)
        return [keras.Variable(w, dtype=dtype) for w in self.weights()]

    def refresh(self, scaled):
        return lambda: None


def measure(shapes="resnet50", target="PyTorch", rows=None):
    """Yields dicts: a recipe, a row, and what its step does on the device."""
    count = parameters(SHAPES[shapes]())
    with as_accelerator():
        for recipe in RECIPES:
            masters = None if recipe.masters == "auto" else recipe.masters
            moved = bytes_of_step(
                shapes, recipe.inner, recipe.kind, masters=masters, slots=recipe.slots
            )
            least = moved / count
            for name, run in (rows or ROWS).items():
                kernels = run(recipe, MetaTensors(shapes, recipe.kind))
                yield {
                    "target": target,
                    "recipe": recipe.name,
                    "row": name,
                    "bytes": round(kernels.bytes / count, 1),
                    "kernels": kernels.launches,
                    "allocations": kernels.allocations,
                    "least": least,
                }


def ours(recipe, tensors, make_kernels=Kernels, compiling=compiling):
    """Returns the `Kernels` of a step by the package."""
    optimizer = keras_lso.LossScaleOptimizer(
        recipe.make_inner(), master_weights=recipe.masters, slot_dtype=recipe.slots
    )
    variables = tensors.variables()
    optimizer.build(variables)
    # The first step compares masters with their variables, or moves what the optimizer
    # owns, later ones do not.
    for _ in range(2):
        with torch.no_grad(), compiling(), RefuseNumbers(), make_kernels() as kernels:
            optimizer.apply(tensors.gradients, variables, scaled=True)
    return kernels


def _peer(recipe, tensors):
    """What `peers_torch` times, on this device.

    GradScaler itself reads the flag where it cannot hand it to a fused kernel.
    """
    with mock.patch.object(peers_torch, "DEVICE", "meta"):
        peers = peers_torch.peers("eager", recipe.inner, clip_norm=recipe.clip_norm)
        # The fastest is the last.
        *_, make = peers.values()
        step = make(tensors)
    for _ in range(2):
        with Kernels(refuse_host=False) as kernels:
            step.run()
    return kernels


ROWS = {"keras_lso": ours, "GradScaler + fused": _peer}
