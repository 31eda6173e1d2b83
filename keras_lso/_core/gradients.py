"""Gradients, and the variables that they belong to."""

from collections.abc import Iterable, Mapping

from keras import ops

from keras_lso._backend import backend
from keras_lso._keras_internals.distribution import check_shards, has_reduced_gradients
from keras_lso._keras_internals.optimizers import (
    check_known,
    check_takes_shards,
    variables_of,
)
from keras_lso._keras_internals.variables import path_of


def _is_array(value):
    """Whether it is one variable or tensor, which may be iterated over, too.

    On JAX a variable may be so for ever.
    """
    return backend.is_variable(value) or ops.is_tensor(value)


def split_pairs(grads_and_vars):
    """Returns the gradients and the variables of `(gradient, variable)` pairs."""
    grads, variables = [], []
    if _is_array(grads_and_vars) or not isinstance(grads_and_vars, Iterable):
        grads_and_vars = [grads_and_vars]
    for pair in grads_and_vars:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not backend.is_variable(pair[1]):
            is_swapped = is_pair and backend.is_variable(pair[0])
            raise TypeError(
                "`grads_and_vars` must be a list of (gradient, variable) pairs, such "
                "as `zip(gradients, model.trainable_variables)`. "
                f"{'The two are swapped. ' if is_swapped else ''}It holds: {pair!r}"
            )
        grads.append(pair[0])
        variables.append(pair[1])
    return grads, variables


def check_some_gradient(optimizer, grads, variables):
    """Refuses gradients that are all None, unless there is nothing to train."""
    if any(g is not None for g in grads):
        return
    # A model whose layers are all frozen trains nothing; that is no error.
    nothing_to_train = optimizer.built and not variables_of(optimizer)
    if not nothing_to_train:
        raise ValueError(
            "No gradients provided for any variable: `grads` holds only None, for "
            f"{len(variables)} variables. Compute the gradients of a loss that "
            "depends on `trainable_variables`."
        )


def check_shapes(grads, variables):
    """Refuses a gradient that is not of its variable's shape.

    Keras would spread one of fewer dimensions over the variable, or fail halfway.
    """
    for grad, variable in zip(grads, variables, strict=True):
        if grad is None or grad.shape == variable.shape:
            continue
        # Inside of `jax.shard_map` Keras knows the shape of the whole variable only.
        shape = ops.convert_to_tensor(variable).shape
        if not _may_be_equal(grad.shape, shape):
            raise ValueError(
                "A gradient must have the shape of its variable: are `grads` in the "
                "order of `trainable_variables`? Received: a gradient of shape "
                f"{tuple(grad.shape)} for the variable {path_of(variable)!r} "
                f"of shape {tuple(shape)}"
            )


def _may_be_equal(shape, other):
    """Whether two shapes are equal, as far as a `tf.function` knows them."""
    if None in (getattr(shape, "rank", 0), getattr(other, "rank", 0)):
        return True
    pairs = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(None in (a, b) or a == b for a, b in pairs)


def _as_list(argument, values, of_what):
    """Returns the items of an argument, which may be any iterable but one tensor."""
    is_other = _is_array(values) or isinstance(values, str | Mapping)
    if is_other or not isinstance(values, Iterable):
        raise TypeError(
            f"Argument `{argument}` must be a list of {of_what}. Received: "
            f"{values!r} of type {type(values).__name__}"
        )
    return list(values)


def check_variables_come_last(grads, variables):
    """Refuses what are no variables; the commonest slip is to swap the two."""
    stranger = next((v for v in variables if not backend.is_variable(v)), None)
    if stranger is None:
        return
    if grads and all(map(backend.is_variable, grads)):
        raise TypeError(
            "`grads` holds variables and `trainable_variables` does not: the two are "
            "swapped. Write `optimizer.apply(grads, trainable_variables)`."
        )
    raise TypeError(
        "`trainable_variables` must be a list of variables, such as "
        "`model.trainable_variables`. It holds: "
        f"{stranger!r} of type {type(stranger).__name__}"
    )


def pair_gradients(optimizer, grads, variables):
    """Pairs gradients and variables, building the optimizer if need be.

    Args:
        optimizer: The optimizer that is to apply them.
        grads: List of tensors, arrays or None.
        variables: List of variables, or None for those that the optimizer knows.

    Returns:
        A tuple of the list of tensors or None, and the list of variables.
    """
    grads, variables = check_gradients(optimizer, grads, variables)
    check_some_gradient(optimizer, grads, variables)
    if not optimizer.built:
        optimizer.build(variables)
    check_known(optimizer, variables)
    return grads, variables


def check_gradients(optimizer, grads, variables):
    """Pairs gradients and variables, and changes nothing: see `pair_gradients`."""
    grads = _as_list("grads", grads, "gradients, one for each variable")
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                "When passing `grads` without `trainable_variables`, the "
                "optimizer must already be built on a list of variables. Call "
                "`optimizer.build(trainable_variables)` first."
            )
        variables = variables_of(optimizer)
    else:
        variables = _as_list("trainable_variables", variables, "variables")
        check_variables_come_last(grads, variables)
    grads = [backend.as_gradient(g) for g in grads]
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` and `trainable_variables` must match one-to-one. Received "
            f"{len(grads)} gradients for {len(variables)} variables. Pass None "
            "for a variable without a gradient."
        )
    check_shards(grads, variables)
    check_shapes(grads, variables)
    return grads, variables


def reduce_gradients(optimizer, grads, variables, overwritten, axis_name):
    """Returns the gradients of all replicas, and whether all have the same now.

    They are added up before they are looked at, since it is the sum that must be
    finite: two finite gradients may add up to inf.

    Args:
        optimizer: The optimizer that is to apply them.
        grads: List of tensors or None, one for each variable.
        variables: List of variables.
        overwritten: List of bools, whether a variable takes its gradient as its value;
            None if none does. That is no gradient, and not added up.
        axis_name: See `LossScaleOptimizer.apply`.

    Returns:
        A tuple of the list of tensors or None, and a bool.
    """
    if has_reduced_gradients():
        return grads, False
    found = grads
    if overwritten is not None:
        pairs = zip(grads, overwritten, strict=True)
        found = [None if is_own else g for g, is_own in pairs]
    found = backend.reduce_gradients(found, axis_name)
    if backend.are_shards(found, variables):
        check_takes_shards(optimizer)
    if overwritten is None:
        return found, True
    return [g if t is None else t for g, t in zip(grads, found, strict=True)], False
