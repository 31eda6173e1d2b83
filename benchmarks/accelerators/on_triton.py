"""The bytes and the kernels of an eager step on PyTorch by our kernels in Triton.

The step is one on the `meta` device, where none of them is launched. What it would move
is told by the program that Triton compiles for it.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.accelerators import on_torch
from benchmarks.accelerators.meta import Kernels
from benchmarks.accelerators.triton_program import bytes_of_blocks, compiled
from keras_lso._backend.torch.triton import steps as torch_triton
from keras_lso._backend.torch.triton import trial as torch_triton_trial

_TYPES = {torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
_TYPES |= {int: "i32", float: "fp32"}


def measure(shapes="resnet50"):
    """Yields dicts: a recipe, its bytes a parameter and its kernels."""
    yield from on_torch.measure(
        shapes, "Triton", {"keras_lso": lambda *a: on_torch.ours(*a, WithLaunches)}
    )


class WithLaunches(Kernels):
    """Counts what our kernels would do as well."""

    def __enter__(self):
        own = torch_triton.import_kernels()
        made = SimpleNamespace(**vars(own) | {"lars_norms": self})
        with contextlib.ExitStack() as stack:
            for module, name, value in (
                (torch_triton, "DEVICES", ("meta",)),
                (torch_triton, "kernels", lambda: made),
                (torch_triton, "_launch", self._launch),
                (torch_triton_trial, "passes", lambda *args: True),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
            self._patches = stack.pop_all()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def __getitem__(self, grid):
        """Stands in for the kernel of LARS that adds the sums of blocks.

        For each block it reads 8 bytes.
        """
        return lambda *args, **given: self._note("lars_norms", 0)

    def _launch(self, kernel, launch, tables, arguments):
        group, name = launch.group, kernel.fn.__name__
        given = dict(zip(("table", "gradients", "owners"), tables, strict=True))
        given |= {"count": group.count, **arguments, **launch.compiled}
        given |= {"N": torch_triton.kernels().BLOCK}
        types = {n: _TYPES.get(_type(value)) for n, value in given.items()}
        types = {n: found for n, found in types.items() if found and n != "N"}
        constants = {n: value for n, value in given.items() if n not in types}
        each, _ = bytes_of_blocks(compiled(name, types, constants))
        elements = sum(t.numel() for t in group.written[: group.count])
        self._note(name, each * elements)

    def _note(self, name, moved):
        self.calls[name] += 1
        self.bytes += moved


def _type(value):
    return value.dtype if torch.is_tensor(value) else type(value)
