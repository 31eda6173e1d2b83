"""Errors for variables and gradients that are not sharded alike."""

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist

from keras_lso._backend.torch.shards import (
    all_sharded,
    any_sharded,
    is_sharded,
    redistributed,
)

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


def sharded_alike(grads, variables, values, redistributes):
    """See `Framework.sharded_alike`."""
    # Without processes there are no shards.
    if not dist.is_available() or not dist.is_initialized():
        return grads
    tensors = list(values)
    if redistributes and any_sharded(grads):
        # Each gradient is exchanged separately, in the order of the list.
        grads = list(map(redistributed, grads, tensors))
    if any_sharded(grads) or any_sharded(tensors):
        for grad, variable, tensor in zip(grads, variables, tensors, strict=True):
            if grad is not None:
                _check_gradient(grad, variable, tensor)
    if not all_sharded(tensors):
        _check_not_left_behind(variables)
    return grads


def _check_gradient(grad, variable, tensor):
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


def _describe(tensor):
    if not is_sharded(tensor):
        return "a plain tensor"
    return f"a DTensor with placements {tensor.placements} on {tensor.device_mesh}"


def _check_not_left_behind(variables):
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


def _left_behind():
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


def _left_behind_by(layer):
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
