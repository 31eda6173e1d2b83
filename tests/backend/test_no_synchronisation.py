"""On PyTorch a step reads nothing from the device and copies nothing to it.

Shown on the `meta` device, whose tensors have no values: to look at one is an error.
What is not computed there is left: how the kernels are called, and how many are.
"""

import collections

import keras
import pytest

import keras_lso
from keras_lso import loss_scales

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from keras_lso.backend import _torch_sharded_step  # noqa: E402

FUSED = ["_fused_sgd_", "_fused_adam_"]
SGD, Adam, AdamW = (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW)
OPTIMIZERS = {
    "SGD": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov and decay": lambda: SGD(
        0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": lambda: Adam(0.1),
    "AdamW": lambda: AdamW(0.1),
    "LARS": lambda: keras_lso.LARS(0.1, weight_decay_rate=0.1),
    "LARS, popular": lambda: keras_lso.LARS(0.1, classic_momentum=False, momentum=0.0),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1),
}
POLICIES = {
    "dynamic": loss_scales.DynamicLossScale,
    "hysteresis": lambda: loss_scales.DynamicLossScale(hysteresis=2),
    "fixed": lambda: loss_scales.FixedLossScale(8.0),
    "LogMax": loss_scales.LogMaxLossScale,
}


@pytest.fixture(autouse=True)
def meta_device(monkeypatch):
    """The fused kernels have no meta version, since they return nothing."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in FUSED:
        for overload in (name, f"{name}.tensor_lr"):
            library.impl(overload, lambda *args, **kwargs: None)
    monkeypatch.setattr(_torch_sharded_step, "_DEVICES", ("meta",))
    with keras.device("meta"):
        yield
    library._destroy()


class Kernels(TorchDispatchMode):
    """Counts what runs on the device, and refuses what comes from the host."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        name = kernel.overloadpacket.__name__
        result = kernel(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                assert tensor.device.type == "meta", f"{name} of a tensor on the host"
        # Memory without a value.
        if not name.startswith("empty"):
            self.calls[name] += 1
        return result


def refuse_numbers(monkeypatch, name):
    make = getattr(torch, name)

    def make_of_tensors(data, *args, **kwargs):
        assert isinstance(data, torch.Tensor), f"{data!r} is copied to the device"
        return make(data, *args, **kwargs)

    monkeypatch.setattr(torch, name, make_of_tensors)


def kernels_of_a_step(monkeypatch, optimizer, count, gradient_dtype=torch.float32):
    variables = [keras.Variable(torch.zeros(3, 4, device="meta")) for _ in range(count)]
    optimizer.build(variables)
    grads = [torch.zeros(3, 4, device="meta", dtype=gradient_dtype) for _ in variables]
    loss = torch.zeros((), device="meta")
    with torch.no_grad(), monkeypatch.context() as patch, Kernels() as kernels:
        refuse_numbers(patch, "tensor")
        refuse_numbers(patch, "as_tensor")
        optimizer.scale_loss(loss)
        optimizer.apply(grads, variables)
    return kernels.calls


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_neither_reads_from_the_device_nor_writes_to_it(
    monkeypatch, inner, policy
):
    optimizer = keras_lso.LossScaleOptimizer(inner(), loss_scale=policy())
    calls = kernels_of_a_step(monkeypatch, optimizer, count=3)
    assert any(name in calls for name in FUSED)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "inner", ["SGD", "momentum", "nesterov and decay", "Adam", "AdamW"]
)
def test_many_tensors_take_as_many_kernels_as_a_few(monkeypatch, inner, dtype):
    few, many = (
        kernels_of_a_step(
            monkeypatch,
            keras_lso.LossScaleOptimizer(OPTIMIZERS[inner]()),
            count,
            getattr(torch, dtype),
        )
        for count in (2, 50)
    )
    assert few == many


@pytest.mark.parametrize("inner", ["LARS", "NovoGrad"])
def test_a_ratio_for_each_tensor_takes_one_kernel_each(monkeypatch, inner):
    few, many = (
        kernels_of_a_step(
            monkeypatch, keras_lso.LossScaleOptimizer(OPTIMIZERS[inner]()), count
        )
        for count in (2, 50)
    )
    assert many - few == {"mul": 48}


def test_what_would_synchronise_is_found(monkeypatch):
    # No rule: its step is taken, or not, by a branch on the host.
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.RMSprop(0.1))
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        kernels_of_a_step(monkeypatch, optimizer, count=1)


def test_what_would_be_copied_is_found(monkeypatch):
    with pytest.raises(AssertionError, match=r"0\.5 is copied"):
        kernels_of_a_step(
            monkeypatch,
            keras_lso.LossScaleOptimizer(SGD(lambda: keras.ops.array(0.5))),
            count=1,
        )
