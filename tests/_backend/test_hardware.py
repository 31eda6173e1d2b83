"""Which hardware computes with a tensor; accelerators are stood in for."""

import types

import keras
import pytest
from keras import ops

from keras_lso._backend import backend

BACKEND = keras.backend.backend()


@pytest.fixture
def cuda(monkeypatch):
    """`cuda(capability)`: a tensor on a GPU of a compute capability, None on ROCm."""
    return {"tensorflow": on_tensorflow, "jax": on_jax, "torch": on_torch}[BACKEND](
        monkeypatch
    )


def on_torch(monkeypatch):
    import torch

    def make(capability):
        monkeypatch.setattr(torch.version, "hip", None if capability else "6.2")
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: capability or (9, 0)
        )
        return types.SimpleNamespace(device=torch.device("cuda:1"))

    return make


def on_jax(monkeypatch):
    def make(capability):
        name = ".".join(map(str, capability)) if capability else "gfx90a"
        gpu = types.SimpleNamespace(platform="gpu", id=1, compute_capability=name)
        return types.SimpleNamespace(devices=lambda: [gpu])

    return make


def on_tensorflow(monkeypatch):
    import tensorflow as tf

    def make(capability):
        details = {"compute_capability": capability} if capability else {}
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: "ab")
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda gpu: details if gpu == "b" else {"compute_capability": (1, 0)},
        )
        place = "/job:localhost/replica:0/task:0/device:GPU:1"
        return types.SimpleNamespace(device=place)

    return make


def test_hardware_of_host_tensor_is_cpu():
    assert backend.host.hardware_of(ops.ones(2)) == "cpu"


@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_hardware_of_gpu_includes_compute_capability(capability, cuda):
    assert backend.host.hardware_of(cuda(capability)) == "gpu:{}.{}".format(*capability)


def test_hardware_of_non_nvidia_gpu_is_none(cuda):
    assert backend.host.hardware_of(cuda(None)) is None


def placed(kind):
    """A tensor on a device of another kind, as far as its place can be seen."""
    if BACKEND == "torch":
        return ops.ones(2).to("meta")
    if BACKEND == "jax":
        device = types.SimpleNamespace(platform=kind, id=0)
        return types.SimpleNamespace(devices=lambda: [device])
    return types.SimpleNamespace(device=f"/device:{kind.upper()}:0")


def test_hardware_of_other_device_is_none():
    assert backend.host.hardware_of(placed("npu")) is None


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch says 'xla' of a TPU")
def test_hardware_of_tpu_is_tpu():
    assert backend.host.hardware_of(placed("tpu")) == "tpu"
