"""How many kernels a step on PyTorch launches, off the CPU."""

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)

import torch

from benchmarks.accelerators import on_torch
from benchmarks.accelerators.meta import as_accelerator
from benchmarks.host import Recipe
from benchmarks.shapes import SHAPES, parameters

# Of the 161 tensors of a ResNet-50. `GradScaler` with fused kernels launches 9 to 11.
CEILINGS = {
    "SGD": 37,
    "SGD+momentum": 38,
    "Adam": 47,
    "AdamW": 50,
    "LARS": 59,
    "LAMB": 79,
}


# Three more than Adam in float32, whatever the kind: the gradients and the weights are
# gathered, and the weights copied back. The bytes are those of a parameter.
COMPILED = {
    ("float16", "auto", None): 44,
    ("bfloat16", "remainder", None): 40,
    ("bfloat16", "remainder8", None): 38,
    ("bfloat16", "stochastic", None): 36,
    ("float32", "auto", "bfloat16"): 48,
    ("bfloat16", "stochastic", "bfloat16"): 28,
}


@pytest.mark.parametrize("inner", CEILINGS)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_step_launches_few_kernels(inner, clip_norm):
    with as_accelerator():
        tensors = on_torch.MetaTensors("resnet50", "float32")
        kernels = on_torch.ours(Recipe(inner, inner, clip_norm=clip_norm), tensors)
    assert kernels.launches <= CEILINGS[inner] + (clip_norm is not None) * 7


def test_addresses_tell_apart_tensors_without_memory():
    with as_accelerator():
        tensor, other = (torch.empty(2, 3, device="meta") for _ in range(2))
        assert tensor.flatten().data_ptr() == tensor.data_ptr() != other.data_ptr()
        assert tensor[1].data_ptr() == tensor.data_ptr() + 12


@pytest.mark.parametrize("kind, masters, slots", COMPILED)
def test_compiled_step_launches_few_kernels(kind, masters, slots):
    with as_accelerator():
        tensors = on_torch.MetaTensors("resnet50", kind)
        recipe = Recipe("Adam", "Adam", kind=kind, masters=masters, slots=slots)
        kernels = on_torch.ours(recipe, tensors)
    assert kernels.launches <= CEILINGS["Adam"] + 3
    most = COMPILED[kind, masters, slots] + 0.1
    assert kernels.bytes <= most * parameters(SHAPES["resnet50"]())
