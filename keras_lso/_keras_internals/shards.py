"""Variables of which each process holds a shard, as with PyTorch's FSDP2."""

import contextlib

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso._keras_internals.slots import slots_of


def check_shards(grads, variables):
    """Refuses what a process sees the wrong part of.

    Args:
        grads: List of tensors or None, one for each variable.
        variables: List of variables.
    """
    backend.check_shards(grads, variables, list(map(_value, variables)))


def shard_slot(slot, variable):
    """Shards a new slot as its variable is.

    Keras makes it of the whole variable's shape, on each process.

    Args:
        slot: Variable.
        variable: Variable.

    Returns:
        The slot.
    """
    if _is_sharded(variable):
        slot._value = backend.sharded_like(_value(slot), _value(variable))
    return slot


@contextlib.contextmanager
def sharded_slots(optimizer, variables):
    """Lets an optimizer that is built in it shard its slots as the variables are.

    Args:
        optimizer: The optimizer. It may wrap others.
        variables: List of the variables that it is built for.
    """
    innermost = chain_of(optimizer)[-1]
    is_done_outside = "add_variable_from_reference" in vars(innermost)
    if is_done_outside or not any(map(_is_sharded, variables)):
        yield
        return
    add = innermost.add_variable_from_reference

    def add_sharded(reference_variable, *args, **kwargs):
        # One by one: for the whole slots of all variables there may be no room.
        slot = add(reference_variable, *args, **kwargs)
        return shard_slot(slot, reference_variable)

    innermost.add_variable_from_reference = add_sharded
    try:
        yield
    finally:
        del innermost.add_variable_from_reference
    _check_slots(innermost, variables)


def _check_slots(optimizer, variables):
    """Refuses slots that were made otherwise."""
    for column in slots_of(optimizer).values():
        for slot, variable in zip(column, variables, strict=True):
            if slot is None or slot.shape != variable.shape or _is_sharded(slot):
                continue
            if _is_sharded(variable):
                raise ValueError(
                    f"The variable {variable.path!r} is sharded, and the optimizer "
                    f"has a slot for it that is not, {slot.path!r}. Pass an optimizer "
                    "that has not been built yet; a `MultiOptimizer` cannot train "
                    f"sharded variables. Received: a {type(optimizer).__name__}"
                )


def _is_sharded(variable):
    return backend.any_sharded([_value(variable)])


def _value(variable):
    return getattr(variable, "_value", variable)
