"""Tensors with a shard in each process: PyTorch's `DTensor`, which FSDP2 uses.

A process computes from its own shards, and the results are reduced. All processes make
the same all-reduces in the same order, whatever the values of their shards.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import torch
import torch.distributed as dist
from torch import Tensor

from keras_lso._backend.replicas import Replicas
from keras_lso._backend.tensors import Grads, Variables

_SHARDED: tuple[type, ...] = ()
if dist.is_available():
    from torch.distributed.tensor import DTensor, distribute_tensor

    _SHARDED = (DTensor,)


def is_sharded(tensor: Any) -> bool:
    """Whether the tensor is a `DTensor`."""
    return isinstance(tensor, _SHARDED)


def any_sharded(tensors: Iterable) -> bool:
    """Whether there is a `DTensor` among the tensors."""
    return not set(_SHARDED).isdisjoint(map(type, tensors))


def shards_of(tensors: Any) -> Any:
    """Returns this process's shards, aliases; plain tensors and None stay."""
    if set(_SHARDED).isdisjoint(map(type, tensors)):
        return tensors
    return [t.to_local() if is_sharded(t) else t for t in tensors]


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a `DTensor`. All processes have to call this function."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


class Layout(NamedTuple):
    """The sharding of a tensor, with the attribute names of Keras's own class."""

    device_mesh: Any
    placements: tuple


@torch.no_grad()
def redistributed(grad: Tensor | None, value: Tensor) -> Tensor | None:
    """Returns a gradient, or None, sharded like its variable's value, or not at all."""
    # A gradient from autograd may be a sum, and each process have a part of it.
    if grad is None or not is_sharded(grad):
        return grad
    if not is_sharded(value):
        return grad.full_tensor()
    if grad.placements == value.placements and grad.device_mesh == value.device_mesh:
        return grad
    return grad.redistribute(value.device_mesh, value.placements)


def first_index(tensor: Tensor) -> int:
    """Returns the place of a shard's first element, as if it were sharded by rows."""
    # Shards of other dimensions also get different places, but not their own.
    if not is_sharded(tensor):
        return 0
    place, rows = 0, tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // max(rows, 1)
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        count, rank = mesh.size(dim), mesh.get_local_rank(dim)
        if placement.is_shard(0):
            # As in `torch.chunk`, the last shards may have fewer rows, or none.
            most = -(-rows // count)
            place += min(rank * most, rows) * row
            rows = max(min(most, rows - rank * most), 0)
        elif placement.is_shard():
            place += rank * tensor.numel()
    return place


def mapped(fn: Callable[[Tensor], torch.Tensor], tensor: Tensor) -> Tensor:
    """Applies an elementwise function to a tensor, or to the shard of a `DTensor`."""
    if not is_sharded(tensor):
        return fn(tensor)
    return DTensor.from_local(
        fn(tensor.to_local()),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class Reductions:
    """The reductions over the processes that hold shards of these tensors."""

    # Nothing is reduced over replicas, whose tensors have the same bits.

    def __init__(self, tensors: list[Tensor]):
        by_layout: dict = {}
        self._groups_of = [_groups_of(t, by_layout) for t in tensors]
        groups = {name: g for gs in by_layout.values() for name, g in gs.items()}
        # Reduce over small process groups first, so that the largest group combines
        # their results.
        self._groups = dict(sorted(groups.items(), key=lambda item: item[1].size()))

    def maximum(self, values: Tensor) -> Tensor:
        """Returns the maximum of each item of a 1D tensor over the processes."""
        # The tensor must have no NaN, which a maximum may lose.
        for group in self._groups.values():
            dist.all_reduce(values, dist.ReduceOp.MAX, group)
        return values

    def sum(self, values: Tensor, owners: Sequence[int]) -> Tensor:
        """Returns the sum of each item of a 1D tensor over the shards of its tensor."""
        # `owners` are the positions of these tensors.
        for name, group in self._groups.items():
            # A tensor that is not sharded in this group counts once.
            groups = [self._groups_of[owner] for owner in owners]
            unsharded = [i for i, names in enumerate(groups) if name not in names]
            if unsharded and dist.get_rank(group):
                # Indexing by a list would copy the positions to the device.
                torch._foreach_zero_([values[i] for i in unsharded])
            dist.all_reduce(values, dist.ReduceOp.SUM, group)
        return values


def _groups_of(tensor: Tensor, by_layout: dict) -> dict[str, Any]:
    """Returns the groups of processes among which the tensor is sharded, by name."""
    if not is_sharded(tensor):
        return {}
    mesh, placements = key = tensor.device_mesh, tensor.placements
    if key not in by_layout:
        groups = [
            mesh.get_group(dim)
            for dim, placement in enumerate(placements)
            if mesh.size(dim) > 1 and not placement.is_replicate()
        ]
        by_layout[key] = {group.group_name: group for group in groups}
    return by_layout[key]


class TorchReplicas(Replicas):
    INSTEAD_OF_SHARD_STATE = (
        "On PyTorch FSDP2 shards weights, gradients and state, `torch.distributed.fsdp."
        'fully_shard`: see the page "Scaling out".'
    )

    def sharded_like(self, value: Tensor, like: Tensor) -> Tensor:
        """See `Replicas.sharded_like`. A tensor that it shards becomes a parameter."""
        stays = is_sharded(value) or value.shape != like.shape
        if stays or not is_sharded(like):
            return value
        sharded = distribute_tensor(
            value.detach(),
            like.device_mesh,
            like.placements,
            # No communication: all processes have the same tensor.
            src_data_rank=None,
        )
        return torch.nn.Parameter(sharded, requires_grad=value.requires_grad)

    def layout_of(self, value: Tensor) -> Layout | None:
        """See `Replicas.layout_of`."""
        if not is_sharded(value):
            return None
        return Layout(value.device_mesh, value.placements)

    def keeps_rows(self, value: Tensor) -> bool:
        """See `Replicas.keeps_rows`."""
        last = value.dim() - 1
        if is_sharded(value) and any(p.is_shard(last) for p in value.placements):
            return False
        [shard] = shards_of([value])
        return shard.is_contiguous()

    def sharded_alike(
        self, grads: Grads, variables: Variables, values: Iterable[Tensor]
    ) -> Grads:
        """See `Replicas.sharded_alike`."""
        # Without processes there are no shards.
        if not dist.is_available() or not dist.is_initialized():
            return grads
        tensors = list(values)
        # In a custom training loop, the gradients must already be right.
        if keras.distribution.distribution() is not None and any_sharded(grads):
            # Each gradient is exchanged separately, in the order of the list.
            grads = list(map(redistributed, grads, tensors))
        if any_sharded(grads) or any_sharded(tensors):
            for grad, variable, tensor in zip(grads, variables, tensors, strict=True):
                if grad is not None:
                    _check_gradient(grad, variable, tensor)
        if not set(_SHARDED).issuperset(map(type, tensors)):
            _check_not_left_behind(variables)
        return grads


# --- Errors for variables and gradients that are not sharded alike -------------------

# The modules for which FSDP keeps a state.
FSDP_MODULES: Any = ()
with contextlib.suppress(ImportError):
    from torch.distributed._composable_state import _module_state_mapping

    FSDP_MODULES = _module_state_mapping

_WHAT_TO_WRITE = (
    "Shard a plain `torch.nn.Module`, and afterwards make its variables: `fully_shard("
    "module); variables = [keras.Variable(p, name=n) for n, p in "
    "module.named_parameters()]`. A Keras "
    "model can be trained with `DistributedDataParallel` and, from Keras 3.16 on, by "
    "`fit` under a `keras.distribution.ModelParallel`, which shards its variables."
)


def _check_gradient(grad: Tensor, variable: keras.Variable, tensor: Tensor) -> None:
    """Raises a `ValueError` for a gradient that is not sharded like its variable."""
    if is_sharded(grad) != is_sharded(tensor):
        raise ValueError(
            f"The gradient of the variable {variable.path!r} is "
            f"{_describe(grad)}, and the variable itself holds {_describe(tensor)}: "
            "each process would apply another step. " + _WHAT_TO_WRITE
        )
    if not is_sharded(grad):
        return
    if grad.placements == tensor.placements and grad.device_mesh == tensor.device_mesh:
        return
    raise ValueError(
        f"The gradient of the variable {variable.path!r} is {_describe(grad)}, and the "
        f"variable itself is {_describe(tensor)}. Pass the gradient as it is sharded: "
        "`grad.redistribute(variable.value.device_mesh, variable.value.placements)`."
    )


def _describe(tensor: Tensor) -> str:
    """Returns how a tensor is sharded, for messages."""
    if not is_sharded(tensor):
        return "a plain tensor"
    return f"a DTensor with placements {tensor.placements} on {tensor.device_mesh}"


def _check_not_left_behind(variables: Variables) -> None:
    """Raises an error for variables that FSDP has replaced in a Keras layer."""
    # The layer still computes with them, and their gradients are not reduced.
    left_behind = _left_behind()
    for variable in variables if left_behind else ():
        if id(variable) in left_behind:
            raise ValueError(
                f"The variable {variable.path!r} belongs to a Keras layer that "
                "`fully_shard` was applied to. Keras computes with the variable, which "
                "is not sharded, and its gradient is that of this process alone: the "
                "processes would drift apart. " + _WHAT_TO_WRITE
            )


def _left_behind() -> set[int]:
    """Returns the ids of variables that are no longer parameters of their module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", ())
    return {
        variable
        for module in list(FSDP_MODULES)
        if isinstance(module, sharded)
        for layer in module.modules()
        for variable in _left_behind_by(layer)
    }


def _left_behind_by(layer: torch.nn.Module) -> set[int]:
    """Returns the ids for one layer, and none for a module that is not Keras's."""
    parameters = getattr(layer, "_torch_params", None)
    if not isinstance(parameters, torch.nn.ParameterDict):
        return set()
    sharded = {path for path, p in parameters.items() if is_sharded(p)}
    if not sharded:
        return set()
    return {
        id(v) for v in layer.variables if v.path in sharded and not is_sharded(v.value)
    }
