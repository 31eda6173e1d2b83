"""Gradients and variables that are distributed over replicas or processes."""

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._backend.tensors import Variables
from keras_lso._keras_internals.optimizers import (
    attributes_set,
    chain_of,
    innermost_of,
    is_keras_3_16,
)
from keras_lso._keras_internals.variables import flat_path, held_by

_this_replica = threading.local()


def reduced_gradients(
    optimizer: keras.Optimizer, are_reduced: bool = True
) -> AbstractContextManager[None]:
    """Returns a context in which an optimizer adds up no gradients of replicas."""
    if not are_reduced:
        return contextlib.nullcontext()
    for reducing in innermost_of(optimizer):
        # Only Keras's TensorFlow optimizers add them up.
        reduce = getattr(reducing, "_all_reduce_sum_gradients", None)
        if reduce is not None and "_all_reduce_sum_gradients" not in vars(reducing):
            reducing._all_reduce_sum_gradients = partial(_reduce_unless_reduced, reduce)
    return attributes_set([(_this_replica, "has_reduced", True)])


def has_reduced_gradients() -> bool:
    """Whether this replica's gradients are the sum over all replicas already."""
    return getattr(_this_replica, "has_reduced", False)


def _reduce_unless_reduced(reduce: Callable[[Any], Any], grads_and_vars: Any) -> Any:
    """Adds up the replicas' gradients, unless the caller has done so."""
    return grads_and_vars if has_reduced_gradients() else reduce(grads_and_vars)


def remember_layouts(variables: Variables) -> None:
    """Lets variables that were made of FSDP2's shards take assigned values."""
    for variable in variables if is_keras_3_16() else ():
        if getattr(variable, "_layout", variable) is None:
            variable._layout = backend.replicas.layout_of(held_by(variable))


def shard_slot(slot: keras.Variable, variable: keras.Variable) -> keras.Variable:
    """Shards a new slot, which has the whole variable's shape, like its variable."""
    if _is_sharded(variable):
        slot._value = backend.replicas.sharded_like(held_by(slot), held_by(variable))
        remember_layouts([slot])
    return slot


@contextlib.contextmanager
def sharded_slots(optimizer: keras.Optimizer, variables: Variables) -> Iterator[None]:
    """Returns a context in which `build` shards slots like their variables."""
    innermost = chain_of(optimizer)[-1]
    is_done_outside = "add_variable_from_reference" in vars(innermost)
    if is_done_outside or not any(_is_sharded(v) for v in variables):
        yield
        return
    add = innermost.add_variable_from_reference

    def add_sharded(
        reference_variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        # One by one, since there may be no room for the whole slots of all variables.
        return shard_slot(add(reference_variable, *args, **kwargs), reference_variable)

    with attributes_set([(innermost, "add_variable_from_reference", add_sharded)]):
        yield
    _check_slots(innermost, variables)


def _check_slots(optimizer: keras.Optimizer, variables: Variables) -> None:
    """Raises an error for slots in the whole shapes of sharded variables."""
    sharded = [v for v in variables if _is_sharded(v)]
    unsharded = [
        v for o in innermost_of(optimizer) for v in o.variables if not _is_sharded(v)
    ]
    for variable, slot in itertools.product(sharded, unsharded):
        is_its_slot = slot.name.startswith(f"{flat_path(variable)}_")
        if is_its_slot and slot.shape == variable.shape:
            raise ValueError(
                f"The variable {variable.path!r} is sharded, and the optimizer has a "
                f"slot for it that is not, {slot.path!r}. Pass an optimizer that has "
                "not been built yet; a `MultiOptimizer` cannot train sharded "
                f"variables. Received: a {type(optimizer).__name__}"
            )


# For a smaller tensor a message costs more than the memory that its parts save.
_SMALLEST_SPREAD = 2**12


def spread_state(
    optimizer: keras.Optimizer, variables: Variables
) -> AbstractContextManager[None]:
    """Returns a context in which state of replicated variables is made in parts.

    Slots, masters and averages take the layout that their variable then has. It spreads
    them over the batch axis of the devices, along which the variable is replicated.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        devices = keras.distribution.list_devices()
        if len(devices) > 1:
            raise ValueError(
                "`shard_state=True` spreads the optimizer's state over the devices of "
                "a `keras.distribution`, and there is none. Before you make the model, "
                "call `keras.distribution.set_distribution("
                f"keras.distribution.DataParallel())`. Received: devices={devices}"
            )
        return contextlib.nullcontext()
    if optimizer.built:
        raise ValueError(
            "The inner optimizer has been built already, with whole slots on each "
            "device. With `shard_state=True`, pass an optimizer that has not been "
            f"used. Received: inner_optimizer={optimizer!r}"
        )
    layouts = [_spread_layout(v, distribution) for v in variables]
    pairs = zip(variables, layouts, strict=True)
    return attributes_set([(v, "_layout", layout) for v, layout in pairs])


def _spread_layout(variable: keras.Variable, distribution: Any) -> Any:
    """Returns the layout of a variable's state, with the batch axis if it fits."""
    layout = getattr(variable, "_layout", None)
    if layout is None:
        raise ValueError(
            f"The variable {variable.path!r} was made before "
            "`keras.distribution.set_distribution` was called, and is on one device. "
            "With `shard_state=True`, make the model afterwards."
        )
    mesh, name = distribution.device_mesh, distribution.batch_dim_name
    size = mesh.shape[mesh.axis_names.index(name)]
    # In Keras 3.12, and where a user gives one, it is a sharding of JAX.
    axes = list(layout.axes if hasattr(layout, "axes") else layout.spec)
    fitting = [
        i
        for i, axis in enumerate(axes)
        if axis is None and variable.shape[i] % size == 0
    ]
    if name in axes or not fitting or math.prod(variable.shape) < _SMALLEST_SPREAD:
        return layout
    axes[fitting[0]] = name
    return keras.distribution.TensorLayout(axes, mesh)


def has_whole_blocks(variable: keras.Variable, block: int) -> bool:
    """Whether each block of a last axis is on one device, in a row of memory."""
    if backend.UPDATES_IN_PLACE:
        return backend.replicas.keeps_rows(held_by(variable))
    layout = getattr(variable, "_layout", None)
    if layout is None:
        return True
    # A sharding of JAX.
    sharding = getattr(layout, "backend_layout", layout)
    return sharding.shard_shape(tuple(variable.shape))[-1] % block == 0


def _is_sharded(variable: keras.Variable) -> bool:
    """Whether a variable holds a shard of a tensor."""
    return backend.replicas.layout_of(held_by(variable)) is not None
