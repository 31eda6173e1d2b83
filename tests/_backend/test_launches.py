"""How many kernels a step on PyTorch launches, off the CPU."""

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)

import torch

from benchmarks.accelerators import on_torch
from benchmarks.accelerators.meta import as_accelerator
from benchmarks.host import Recipe

# Of the 161 tensors of a ResNet-50. `GradScaler` with fused kernels launches 9 to 11.
CEILINGS = {
    "SGD": 38,
    "SGD+momentum": 39,
    "Adam": 48,
    "AdamW": 51,
    "LARS": 63,
    "LAMB": 80,
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
