"""The dtype policy for a piece of hardware, as in the table of `docs/policies.md`."""

import re
from typing import Any

import keras

from keras_lso._backend import backend

HARDWARE = "'auto', 'cpu', 'tpu' or 'gpu:7.5', with the compute capability of the GPU"
# The compute capabilities from which GPUs have Tensor Cores for a dtype.
_TENSOR_CORES = {"float16": (7, 0), "bfloat16": (8, 0)}
_GPU = re.compile(r"gpu:(\d{1,3})\.(\d{1,3})")


def check_hardware(hardware: str) -> str:
    """Returns `hardware`. Raises a `ValueError` if it is not valid."""
    is_named = isinstance(hardware, str) and hardware in ("auto", "cpu", "tpu")
    if is_named or (isinstance(hardware, str) and _GPU.fullmatch(hardware)):
        return hardware
    raise ValueError(
        f"Argument `hardware` must be {HARDWARE}. Received: hardware={hardware!r}"
    )


def hardware_of(model: keras.Model, x: Any) -> str:
    """Returns the hardware that a model is on.

    Args:
        model: A `keras.Model` that is built.
        x: The model's inputs, tensors. They tell the hardware of a model without
            weights.

    Raises:
        ValueError: If the dtypes in which the hardware is fast are unknown.
    """
    tensors = [v.value for v in model.weights[:1]] or keras.tree.flatten(x)
    found = backend.hardware_of(tensors[0])
    if found is None:
        raise ValueError(
            "`hardware='auto'` knows CPUs, TPUs and NVIDIA's GPUs, and the model is on "
            "another device. Name hardware that is fast in the same dtypes: "
            "'gpu:8.0' (bfloat16 and float16), 'gpu:7.5' (float16 alone) or 'cpu' "
            f"(float32). Received: hardware='auto', and the devices "
            f"{backend.devices()}"
        )
    return found


def policy_for(hardware: str) -> tuple[str, str]:
    """Returns the dtype policy for the hardware, and the reason as a sentence.

    Args:
        hardware: String that `check_hardware` accepts, except `"auto"`.
    """
    if hardware == "cpu":
        return "float32", "A CPU computes in float32 as fast as in 16 bits, or faster."
    if hardware == "tpu":
        return (
            "mixed_bfloat16",
            "A TPU multiplies in bfloat16, which has the range of float32.",
        )
    capability = _capability(hardware)
    gpu = "A GPU of compute capability {}.{}".format(*capability)
    if capability < _TENSOR_CORES["float16"]:
        return "float32", f"{gpu} has no Tensor Cores, which make 16 bits fast."
    if capability < _TENSOR_CORES["bfloat16"]:
        return (
            "mixed_float16",
            f"{gpu} has Tensor Cores for float16, but none for bfloat16.",
        )
    return (
        "mixed_bfloat16",
        f"{gpu} computes in bfloat16 as fast as in float16, and bfloat16 has the range "
        "of float32.",
    )


def is_fast_in(hardware: str, dtype: str) -> bool:
    """Whether the hardware computes in a dtype of 16 bits faster than in float32."""
    if hardware in ("cpu", "tpu"):
        return hardware == "tpu" and dtype == "bfloat16"
    return _capability(hardware) >= _TENSOR_CORES[dtype]


def _capability(hardware):
    """Returns the compute capability as a tuple of ints, which can be compared."""
    major, minor = hardware.removeprefix("gpu:").split(".")
    return int(major), int(minor)
