"""What a step on PyTorch would do on a device, told on the `meta` device.

Its tensors have no values: to look at one is an error, and nothing is computed. What is
left is how the kernels are called, how many are, and how many bytes they move.
"""

import collections
import contextlib
import math
from unittest import mock

import keras
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from keras_lso._backend.torch import compiled
from keras_lso._backend.torch import lists as torch_lists

# They have no version for this device, since they return nothing.
_WITHOUT = (
    "_fused_sgd_",
    "_fused_sgd_.tensor_lr",
    "_fused_adam_",
    "_fused_adam_.tensor_lr",
    "_fused_adamw_",
    "_fused_adamw_.tensor_lr",
    "_amp_foreach_non_finite_check_and_unscale_",
)
# These look at no element.
_VIEWS = ["view", "slice", "select", "unbind", "detach", "alias", "expand"]
_VIEWS += ["as_strided"]
_SUPPORTED = "torch.optim.optimizer._get_fused_kernels_supported_devices"


@contextlib.contextmanager
def as_accelerator():
    """Makes the `meta` device one that Keras and the fused kernels run on."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    try:
        for name in _WITHOUT:
            library.impl(name, lambda *args, **kwargs: None)
        with (
            mock.patch.object(torch.Tensor, "data_ptr", _address),
            mock.patch.object(torch_lists, "DEVICES", ("meta",)),
            mock.patch(_SUPPORTED, lambda: ["meta"]),
            keras.device("meta"),
        ):
            yield
    finally:
        library._destroy()


def _address(tensor):
    """Returns a number that tells apart where tensors would lie, since none does."""
    start = tensor.untyped_storage()._cdata
    return start + tensor.storage_offset() * tensor.element_size()


_COMPILED = torch.library.Library("meta_device", "FRAGMENT")
_COMPILED.define("compiled_step(Tensor[] read, Tensor(a!)[] written) -> ()")
_COMPILED.impl("compiled_step", lambda *args: None, "Meta")


@contextlib.contextmanager
def compiling():
    """Lets the steps of 16-bit numbers be compiled, as they are on a GPU.

    Nothing is compiled for this device. A chunk's kernel is one call that reads the
    gradient, and reads and writes the other columns, as the one for a GPU does.
    """

    def step(framework, factor, flag, rule, codec, columns, keys, table, norms):
        gradient, *written = columns
        read = [gradient, *keys.values(), *(table or ())]
        torch.ops.meta_device.compiled_step(read, written)
        return True

    with (
        mock.patch.object(compiled, "is_on", lambda tensor: True),
        mock.patch.object(compiled, "_compiled", lambda in_blocks: step),
    ):
        yield


class Kernels(TorchDispatchMode):
    """Counts what runs on the device.

    Args:
        refuse_host: Bool. Whether to refuse a tensor that comes from the host. Defaults
            to `True`.

    Attributes:
        calls: Counter of the operations by their names.
        launches: Int. How many kernels they launch with CUDA 13.
        bytes: Int. What they read and write.
        allocations: Int. How many tensors the host makes.
    """

    def __init__(self, refuse_host=True):
        super().__init__()
        self._refuse_host = refuse_host
        self.calls = collections.Counter()
        self.launches = self.bytes = self.allocations = 0

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        name = kernel.overloadpacket.__name__
        result = kernel(*args, **(kwargs or {}))
        tensors = _tensors_in((args, kwargs, result))
        if self._refuse_host:
            for tensor in tensors:
                assert tensor.device.type == "meta", f"{name} of a tensor on the host"
        if name not in _VIEWS:
            given = set(map(id, _tensors_in((args, kwargs))))
            results = map(id, _tensors_in(result))
            self.allocations += sum(i not in given for i in results)
        # Memory without a value, and a view of memory, are no kernels.
        if not name.startswith(("empty", "new_empty")) and name not in _VIEWS:
            self.calls[name] += 1
            self.launches += _launches(name, args)
            self.bytes += _bytes_moved(kernel, args, kwargs or {}, result)
        return result


# What one launch takes over lists of tensors, with 32 KiB of arguments: the tensors, by
# the number of lists, and the blocks of 2**16 elements. See MultiTensorApply.cuh.
_MOST_TENSORS = (770, 448, 336, 252, 210)
_MOST_BLOCKS = 2240
_BLOCK = 2**16


def _launches(name, args):
    """Returns the number of kernels that an operation launches."""
    lists = [a for a in args if isinstance(a, list | tuple) and _tensors_in(a)]
    if name in ("stack", "cat"):
        return math.ceil(len(lists[0]) / 128)
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return 1
    if name.startswith("_foreach_norm"):
        # Two kernels fill its results, and one in 512 tensors adds up the blocks.
        return 2 + _of_lists(1, lists[0]) + math.ceil(len(lists[0]) / 512)
    returns_list = name.startswith("_foreach_") and not name.endswith("_")
    return _of_lists(len(lists) + returns_list, lists[0])


def _of_lists(depth, tensors):
    """Returns the number of launches over some lists, of which one is given."""
    launches = count = blocks = 0
    for tensor in filter(torch.Tensor.numel, tensors):
        count += 1
        left = math.ceil(tensor.numel() / _BLOCK)
        while left:
            taken = min(left, _MOST_BLOCKS - blocks)
            blocks, left = blocks + taken, left - taken
            is_full = count == _MOST_TENSORS[depth - 1] and not left
            if is_full or blocks == _MOST_BLOCKS:
                launches, blocks, count = launches + 1, 0, int(left > 0)
    return launches + (blocks > 0)


def _tensors_in(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _bytes_moved(kernel, args, kwargs, result):
    """Each tensor that a kernel is given is read, and what it changes is written.

    What it returns is written as well, unless that is what it was given.
    """
    schema = kernel._schema.arguments
    given = {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs
    written = {a.name for a in schema if a.alias_info and a.alias_info.is_write}
    name = kernel.overloadpacket.__name__
    if name.startswith("_fused_") and given.get("grad_scale") is None:
        # Without a scale the gradients stay as they are.
        written.discard("grads")
    read = set(given) - {"out"}
    if name in ("copy_", "_foreach_copy_", "fill_", "zero_"):
        read -= written
    if name.startswith("new_") or name.endswith("_like"):
        read = set()
    read = _tensors_in([given[n] for n in read])
    new = _tensors_in([given[n] for n in written if n in given])
    known = {id(t) for t in read + new}
    new += [t for t in _tensors_in(result) if id(t) not in known]
    # One that is given twice is in the cache.
    return sum(
        t.numel() * t.element_size()
        for once in (read, new)
        for t in {id(t): t for t in once}.values()
    )


class RefuseNumbers(TorchFunctionMode):
    """Refuses tensors that are made of numbers, which would be copied to the device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor):
            is_on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
            of_tensor = isinstance(args[0], torch.Tensor)
            assert is_on_host or of_tensor, f"{args[0]!r} is copied to the device"
        return function(*args, **kwargs)
