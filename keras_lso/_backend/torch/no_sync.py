"""Any optimizer's own step on an accelerator, without synchronising with the host.

A branch on the host would wait for the device, and no CUDA graph can record it. So the
state is copied before the step. If the step is applied, writing back moves nothing.

`keras.ops` copies each Python number to the device, which synchronises. Here a kernel
writes it. Where `keras.ops.cond` would also read a flag, both branches are computed.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from keras_lso._backend.tensors import Grads, StepFunction, Storage, Variables
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.lists import can_copy_unless, copy_unless
from keras_lso._backend.torch.shards import mapped, shards_of

# More numbers than this are copied: a kernel for each would take longer.
_FEW = 32
# Branches beyond these read their flags, since each branch may double the work.
_MOST_BRANCHES = 4


def run_or_undo(
    finite: Tensor, step: StepFunction, grads: Grads, state: Variables
) -> None:
    """See `Framework.run_if`."""
    tensors = [v.value for v in state]
    copies = copies_of(tensors)
    # Keras's own steps convert many Python numbers to tensors.
    with NumbersOnDevice():
        step(grads)
    # In a `StatelessScope` a step does not write the tensor, but replaces it.
    pairs = zip(state, tensors, strict=True)
    storage = [tensor if v.value is tensor else v for v, tensor in pairs]
    restore(storage, copies, torch.logical_not(finite))


@torch.no_grad()
def copies_of(storage: list[Storage]) -> list[Tensor]:
    """See `Framework.copies_of`. One kernel for all tensors."""
    tensors = shards_of([v if torch.is_tensor(v) else v.value for v in storage])
    copies = list(map(torch.empty_like, tensors))
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


@torch.no_grad()
def restore(storage: list[Storage], values: list[Tensor], flag: Tensor) -> None:
    """See `Framework.restore`. On an accelerator, kernels read the flag."""
    on_host = torch_measure.is_on_host(flag)
    if on_host and not flag:
        return
    by_dtype: dict = collections.defaultdict(lambda: ([], []))
    for v, value in zip(storage, values, strict=True):
        if not torch.is_tensor(v):
            v.assign(mapped(functools.partial(torch.where, flag, value), v.value))
            continue
        [target] = shards_of([v])
        if on_host or can_copy_unless(target):
            targets, sources = by_dtype[target.dtype]
            targets.append(target)
            sources.append(value)
        else:
            target.copy_(torch.where(flag, value, target))
    for targets, sources in by_dtype.values():
        if on_host:
            torch._foreach_copy_(targets, sources)
        else:
            copy_unless(torch_measure.found_inf_of(flag), targets, sources)


# --- Python numbers on the device ---------------------------------------------------


def without_host(function: Callable[[], Any], near: Tensor) -> Any:
    """See `Framework.without_host`."""
    return function() if torch_measure.is_on_host(near) else _select(function, ())


def _select(function: Callable[[], Any], answers: tuple[bool, ...]) -> Any:
    """Runs a function. Its first branches follow `answers`; others take both sides."""
    # One run takes the True side of all later branches. For each of these, a recursive
    # call takes its False side, and the True side of the branches before it.
    with _Scalars(answers) as scalars:
        result = function()
    for i, condition in reversed(list(enumerate(scalars.conditions))):
        other = _select(function, (*answers, *(i * (True,)), False))
        result = torch.where(condition, result, other)
    return result


class NumbersOnDevice(TorchFunctionMode):
    """Writes Python numbers on the device, and keeps scalar tensors there."""

    def __torch_function__(
        self,
        function: Callable,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.as_tensor, torch.tensor):
            return _written(function, args, kwargs)
        if function is torch._foreach_add_ and torch.is_tensor(kwargs.get("alpha")):
            # It would read `alpha`, the learning rate in Keras's SGD and Adadelta.
            tensors, others = args
            return function(tensors, torch._foreach_mul(others, kwargs["alpha"]))
        return function(*args, **kwargs)


class _Scalars(NumbersOnDevice):
    """A mode that also takes branches without reading from the device."""

    # `conditions` are those of the branches without an answer, which take the True
    # side.

    def __init__(self, answers: tuple[bool, ...]) -> None:
        super().__init__()
        self._answers = list(answers)
        self.conditions: list[Tensor] = []
        self._branches_left = _MOST_BRANCHES

    def __torch_function__(
        self,
        function: Callable,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        # In a graph, the truth of a tensor is its `item`.
        asks = function in (torch.Tensor.__bool__, torch.Tensor.item)
        if asks and args[0].dtype == torch.bool and self._branches_left:
            self._branches_left -= 1
            if self._answers:
                return self._answers.pop(0)
            self.conditions.append(args[0].bool())
            return True
        return super().__torch_function__(function, types, args, kwargs)


def _written(make: Callable[..., torch.Tensor], args: tuple, kwargs: dict) -> Tensor:
    """Makes a tensor. On a device, `torch.full` makes a tensor of a few numbers."""
    device = torch.device(kwargs.get("device") or "cpu")
    is_plain = args and isinstance(args[0], bool | int | float | np.ndarray | np.number)
    if device.type == "cpu" or not is_plain or not 0 < np.size(args[0]) <= _FEW:
        return make(*args, **kwargs)
    dtype = kwargs.get("dtype") or torch.as_tensor(args[0], device="cpu").dtype
    numbers = [
        torch.full((), number, dtype=dtype, device=device)
        for number in np.ravel(args[0]).tolist()
    ]
    shape = np.shape(args[0])
    return torch.stack(numbers).view(shape) if shape else numbers[0]
