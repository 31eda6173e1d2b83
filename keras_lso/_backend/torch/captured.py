"""Steps that are captured in CUDA graphs, which the host launches in one call.

A step reads nothing on the host, so it can be captured. Once a few steps were equal in
all that decides what a step launches, one is captured, and it is replayed while that
stays equal: the attributes that it reads from Python, and the memory of what it reads
and writes on the device. All other steps are taken as without graphs.
"""

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import keras
import numpy as np
import torch
from torch import Tensor

from keras_lso._backend.framework import KERNELS
from keras_lso._backend.tensors import Storage
from keras_lso._backend.torch.layouts import is_recorded
from keras_lso._backend.torch.measure import TENSOR_TYPES, capturing, dtype_of

IS_ON = KERNELS == "graph"
# They do what is done once, such as compiling a kernel.
_STEPS_BEFORE = 3
# Each holds the temporary tensors of a step, and perhaps copies of its gradients.
_MOST_GRAPHS = 4
_BY_VALUE = {type(None), bool, int, float, str}


def can_capture(tensor: Tensor) -> bool:
    """Whether a step on the device of a tensor can be captured."""
    return tensor.is_cuda and torch.version.hip is None and not is_recorded()


def capture(step: Callable[[], None], device: torch.device, pool: Any) -> Any:
    """Returns a CUDA graph of a step, without taking it."""
    graph, stream = torch.cuda.CUDAGraph(), _stream_on(device)
    # Other threads, which load data or watch collectives, may call what a capture
    # does not permit.
    mode = "thread_local"
    with (
        torch.cuda.device(device),
        # After an error PyTorch's context leaves its stream the current one.
        torch.cuda.stream(stream),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode),
    ):
        step()
    return graph


@functools.cache
def _stream_on(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures on a device: one pool needs one stream."""
    # PyTorch's own is on the device of the first capture of the process. On another
    # one a step would be taken, and its graph would be empty.
    return torch.cuda.Stream(device)


class CapturedStep(NamedTuple):
    """A step in a graph, which reads gradients in some memory, or else the copies."""

    graph: Any
    addresses: list[int] | None
    copies: list[Tensor] | None
    # What its key has by identity, so that nothing else can have the same.
    kept: list[list]

    def takes(self, addresses: list[int] | None) -> bool:
        """Whether it can be replayed with gradients in this memory."""
        return self.copies is not None or self.addresses == addresses


class CapturedSteps:
    """The captured steps of an optimizer."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, CapturedStep] = {}
        # For steps that may be captured, where the gradients of the last ones were.
        self._before: dict[Hashable, list] = {}
        self._has_failed = False

    @torch.no_grad()
    def __call__(
        self,
        update: Any,
        facts: tuple[Hashable, ...],
        owners: list[Any],
        state: list[Storage],
        take: Callable[[Any], None],
    ) -> None:
        """See `Framework.captured_steps`."""
        grads, weights = update.grads, update.weights
        state = [*weights.variables, *state]
        key = self._key(facts, owners, grads, state)
        if key is None:
            take(update)
            return
        addresses = _addresses_of(grads)
        captured = self._steps.get(key)
        if captured is None or not captured.takes(addresses):
            take(update)
            if self._is_like_last_steps(key, addresses):
                self._capture(key, owners, addresses, update, take)
        elif weights.chunks.are_current(weights):
            if captured.copies is not None:
                torch._foreach_copy_(captured.copies, grads)
            captured.graph.replay()
            # Autograd relies on the versions, and so do masters in other optimizers.
            torch.autograd.graph.increment_version(state)
        else:
            take(update)
        weights.chunks.note_versions(weights)

    def _key(
        self,
        facts: tuple[Hashable, ...],
        owners: list[Any],
        grads: list[Tensor],
        state: list[Storage],
    ) -> Hashable | None:
        """Returns what decides what a step launches; None if it is not captured."""
        if (
            self._has_failed
            or torch.is_inference_mode_enabled()
            or not can_capture(grads[0])
            or not set(map(type, [*grads, *state])) <= TENSOR_TYPES
        ):
            return None
        attributes = [
            # Most of them, without a call.
            value if type(value) in _BY_VALUE else _fact(value)
            for owner in owners
            for value in vars(owner).values()
        ]
        return (
            facts,
            tuple(attributes),
            (keras.config.floatx(), torch.get_default_dtype()),
            grads[0].device,
            tuple(map(dtype_of, grads)),
            tuple(map(torch.Tensor.stride, [*grads, *state])),
            tuple(map(torch.Tensor.data_ptr, state)),
        )

    def _is_like_last_steps(self, key: Hashable, addresses: list[int] | None) -> bool:
        """Whether to capture a step, after some that were equal to it."""
        before = self._before.setdefault(key, [])
        before.append(addresses)
        if len(self._before) > _MOST_GRAPHS:
            del self._before[next(iter(self._before))]
        return len(before) == _STEPS_BEFORE

    def _capture(
        self,
        key: Hashable,
        owners: list[Any],
        addresses: list[int] | None,
        update: Any,
        take: Callable[[Any], None],
    ) -> None:
        """Captures a step."""
        # In `fit` the memory of gradients is freed, and may be another in each step.
        old, before = self._steps.pop(key, None), self._before.pop(key)
        is_same = old is None and before == [addresses] * len(before)
        copies = None
        if not is_same or addresses is None:
            copies = list(map(torch.empty_like, update.grads))
        grads = update.grads if copies is None else copies
        # One pool: after a replay nothing needs its temporary tensors.
        pool = next((s.graph.pool() for s in self._steps.values()), None)
        try:
            with capturing():
                begin, device = update.rule_update.begin, grads[0].device
                graph = capture(lambda: take(begin(grads)), device, pool)
        except RuntimeError as error:
            self._has_failed = True
            self._steps.clear()
            warnings.warn(
                "A step could not be captured in a CUDA graph, and this optimizer "
                "steps without graphs, with the same results. The cause: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
            return
        kept = [owners, *(list(vars(owner).values()) for owner in owners)]
        if len(self._steps) == _MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]
        self._steps[key] = CapturedStep(graph, addresses, copies, kept)


def _addresses_of(grads: list[Tensor]) -> list[int] | None:
    """Returns the memory of gradients; None if a graph may not read them there."""
    if any(map(torch.Tensor.is_neg, grads)):
        return None
    return list(map(torch.Tensor.data_ptr, grads))


def _fact(value: Any) -> Hashable:
    """Returns what is compared of an attribute: its numbers, or its identity."""
    if type(value) in _BY_VALUE:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    # Lists of variables would take long. Their memory is compared.
    is_list = isinstance(value, list | tuple) and value
    if is_list and not isinstance(value[0], keras.Variable):
        return tuple(map(_fact, value))
    return id(value)
