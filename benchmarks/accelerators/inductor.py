"""What Inductor makes of a function for an H200, by its compilers, without one.

The function is traced on the host, by tensors without memory. Then its graph is moved
to the device: Inductor writes Triton kernels for it, and Triton and `ptxas` compile
them. They need a description of the device, not the device. Nothing runs.
"""

import contextlib
import dataclasses
import io
import pathlib
import re
import types
from functools import partial
from unittest import mock

import keras
import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

DEVICE = torch.device("cuda", 0)
H200 = pathlib.Path(__file__).with_name("h200.txtpb")
_torch_compile = torch.compile


@dataclasses.dataclass
class Program:
    """What Inductor makes of a graph.

    Attributes:
        kernels: Int. How many kernels it launches.
        bytes: Int. What they read and write, by Inductor's own count: each tensor once
            for each kernel that reads it, and once for each that writes it.
        registers: List of integers, those of a thread, for each kernel that Triton has
            compiled, and each size of its blocks that Inductor would try.
        spilled: List of integers, likewise: the bytes that a thread has no register
            for.
    """

    kernels: int = 0
    bytes: int = 0
    registers: list = dataclasses.field(default_factory=list)
    spilled: list = dataclasses.field(default_factory=list)


class Inductor:
    """Has `compile` in place of `torch.compile`.

    Attributes:
        calls: List with the `Program` of each call of a compiled function.
    """

    def __init__(self):
        self.calls = []

    def compile(self, function, *, options=None, **how):
        """Returns a function that is compiled when it is called, and does nothing."""
        backend = partial(
            compile_fx,
            inner_compile=self._compiled,
            config_patches={**(options or {}), "compile_threads": 1},
        )
        compiled = _torch_compile(function, backend=backend, **how)

        def call(*args):
            # The modes count and refuse what runs around the function.
            with (
                _disable_current_modes(),
                torch._C.DisableTorchFunction(),
                keras.device("cpu"),
            ):
                return compiled(*_on_host(args))

        return call

    def _compiled(self, graph, inputs, **how):
        """Stands for `compile_fx_inner`."""
        [output] = graph.graph.find_nodes(op="output")
        assert not output.args[0], "A function without memory returns no tensor."
        program = Program()
        with _described(), _recorded(program), fresh_cache():
            compile_fx_inner(graph, _on_device(graph, inputs), **how)

        def run(args):
            self.calls.append(program)
            return ()

        run._boxed_call = True
        return run


def _on_host(args):
    """Returns arguments with tensors that have no memory in place of theirs."""
    mode, known = FakeTensorMode(), {}

    def moved(arg):
        if dataclasses.is_dataclass(arg):
            fields = {f.name: getattr(arg, f.name) for f in dataclasses.fields(arg)}
            return dataclasses.replace(arg, **pytree.tree_map(moved, fields))
        if not isinstance(arg, torch.Tensor):
            return arg
        if id(arg) not in known:
            with mode:
                known[id(arg)] = torch.empty_strided(
                    arg.shape, arg.stride(), dtype=arg.dtype
                )
        return known[id(arg)]

    return pytree.tree_map(moved, args)


def _on_device(graph, inputs):
    """Moves a graph to the device, and returns its inputs there."""
    # A Python number is a scalar in float64, which stays on the host: Inductor makes an
    # argument of it. A constant without dimensions becomes a part of the kernel.
    is_number = lambda t: t.ndim == 0 and t.dtype == torch.float64  # noqa: E731

    def moved(value):
        if not isinstance(value, torch.Tensor) or is_number(value):
            return value
        with value.fake_mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=DEVICE
            )

    inputs = list(map(moved, inputs))
    for node in graph.graph.nodes:
        node.meta.pop("tensor_meta", None)
        if "device" in node.kwargs and node.meta["val"].ndim:
            node.kwargs = {**node.kwargs, "device": DEVICE}
    graph.recompile()
    mode = next(i.fake_mode for i in inputs if isinstance(i, torch.Tensor))
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    return inputs


@contextlib.contextmanager
def _recorded(program):
    """Writes what Inductor and Triton make of a graph into a `Program`."""
    to_module, precompile = GraphLowering.compile_to_module, CachingAutotuner.precompile

    def count(graph):
        module = to_module(graph)
        nodes = graph.scheduler.nodes
        nodes = [n for n in nodes if not isinstance(n, NopKernelSchedulerNode)]
        program.kernels = len(nodes)
        program.bytes = sum(n.get_read_write_buffers_sizes() for n in nodes)
        return module

    def compile_only(kernel, *args, **kwargs):
        log = io.StringIO()
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            precompile(kernel, warm_cache_only=True)
        registers, spilled = used(log.getvalue())
        program.registers += registers
        program.spilled += spilled

    with (
        mock.patch.object(GraphLowering, "compile_to_module", count),
        mock.patch.object(CachingAutotuner, "precompile", compile_only),
    ):
        yield


def used(log):
    """Returns the registers and the spilled bytes that a log of `ptxas` tells."""
    registers = re.findall(r"Used (\d+) registers", log)
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    return list(map(int, registers)), list(map(int, spilled))


@contextlib.contextmanager
def _described():
    """Tells Inductor and Triton that the device is there."""
    text = H200.read_text()
    numbers = dict(re.findall(r"(\w+): (\d+)", text))
    described = {
        "multi_processor_count": "core_count",
        "regs_per_multiprocessor": "registers_per_core_limit",
        "max_threads_per_multi_processor": "threads_per_core_limit",
        "max_threads_per_block": "threads_per_block_limit",
        "warp_size": "threads_per_warp",
    }
    described = {name: int(numbers[other]) for name, other in described.items()}
    [major] = map(int, re.findall(r"cuda_compute_capability { major: (\d+)", text))
    device = types.SimpleNamespace(major=major, minor=0, **described)
    capability = 10 * device.major + device.minor
    answers = {
        "is_available": True,
        "current_device": DEVICE.index,
        "get_device_properties": device,
        "get_compute_capability": capability,
        "is_bf16_supported": True,
    }
    target = GPUTarget(DEVICE.type, capability, device.warp_size)
    patches = [
        (torch.cuda, "get_device_properties", lambda *args: device),
        # What compiled code imports.
        (torch._C, "_cuda_getCurrentRawStream", None),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (triton.runtime.driver, "_active", _Driver(target)),
    ]
    for name, answer in answers.items():
        told = staticmethod(lambda *args, answer=answer, **kwargs: answer)
        owners = CudaInterface, CudaInterface.Worker
        patches += [(owner, name, told) for owner in owners if hasattr(owner, name)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch, create=True))
        has_triton.cache_clear()
        yield
    has_triton.cache_clear()


@dataclasses.dataclass
class _Driver:
    """Stands for Triton's driver of the device."""

    target: GPUTarget

    def get_current_target(self):
        return self.target
