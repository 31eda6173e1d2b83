"""A stand-in for CUDA graphs on a CPU, where a step takes the path of a GPU."""

import contextlib
from unittest import mock

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from keras_lso._backend.torch import captured, measure

# They read the device.
_WAITS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero"}


class Graph:
    """As `torch.cuda.CUDAGraph`: replays operations on the memory they were given.

    As on CUDA, to capture an operation does not run it, a replay runs no Python of the
    step and raises no version, and what waits for the device is an error.
    """

    def __init__(self):
        self.operations = []
        self.replays = 0

    def pool(self):
        return None

    def reads(self, tensors):
        """Whether an operation is given the memory of one of the tensors."""
        arguments = _tensors_in([op[1:3] for op in self.operations])
        memory = {t.data_ptr() for t in tensors}
        return not memory.isdisjoint(t.data_ptr() for t in arguments)

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for kernel, args, kwargs, results in self.operations:
            new = _tensors_in(kernel(*args, **kwargs))
            for result, value in zip(results, new, strict=True):
                if result.data_ptr() != value.data_ptr():
                    result.copy_(value)


class _Capture(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self._graph = graph
        self._own = set()
        self.before = {}
        self._in_memory = {}

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = kernel.overloadpacket.__name__
        if name in _WAITS:
            raise RuntimeError(f"{name}: not permitted when a stream is capturing")
        for tensor in _written(kernel, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = kernel(*args, **kwargs)
        returns = kernel._schema.returns
        if name == "lift_fresh":
            # A tensor of numbers. A GPU writes them anew in each replay.
            kernel, args = torch.ops.aten.copy_.default, (result, result.clone())
        elif any(r.alias_info and not r.alias_info.is_write for r in returns):
            return result  # A view.
        if name == "lift_fresh" or not any(r.alias_info for r in returns):
            self._own |= {t.untyped_storage().data_ptr() for t in _tensors_in(result)}
        operation = kernel, *map(self._as_memory, (args, kwargs, _tensors_in(result)))
        self._graph.operations.append(operation)
        return result

    def _as_memory(self, tree):
        """The same with tensors of the same memory, whatever becomes of the others."""

        def as_memory(tensor):
            pair = self._in_memory.setdefault(id(tensor), (tensor, tensor.data))
            return pair[1]

        return _pytree.tree_map_only(torch.Tensor, as_memory, tree)


def _tensors_in(tree):
    return [t for t in _pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _written(kernel, args, kwargs):
    arguments = kernel._schema.arguments
    given = {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
    return [
        tensor
        for argument in arguments
        if argument.alias_info and argument.alias_info.is_write
        for tensor in _tensors_in(given.get(argument.name))
    ]


class Captures:
    """Captures steps as `captured.capture` does; `graphs` are the results."""

    def __init__(self):
        self.graphs = []

    @property
    def replays(self):
        return sum(graph.replays for graph in self.graphs)

    def __call__(self, step, device, pool):
        graph = Graph()
        mode = _Capture(graph)
        cuda = torch.cuda
        try:
            with (
                mock.patch.object(cuda, "is_initialized", lambda: True),
                mock.patch.object(cuda, "is_current_stream_capturing", lambda: True),
                mode,
            ):
                step()
        finally:
            for storage, before in mode.before.values():
                storage.copy_(before)
        self.graphs.append(graph)
        return graph


@contextlib.contextmanager
def capturing_steps(*, is_on=True):
    """Steps take a GPU's path on the CPU; new optimizers capture them if `is_on`."""
    captures = Captures()
    with (
        mock.patch.object(measure, "is_on_host", lambda tensor: False),
        mock.patch.object(captured, "IS_ON", is_on),
        mock.patch.object(captured, "can_capture", lambda tensor: True),
        mock.patch.object(captured, "capture", captures),
    ):
        yield captures
