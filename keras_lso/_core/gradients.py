"""Gradients, and the variables that they belong to."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import Grads, Tensor, Variables, shown
from keras_lso._core.checks import refusal
from keras_lso._keras_internals.distribution import has_reduced_gradients
from keras_lso._keras_internals.optimizers import (
    chain_of,
    check_known,
    check_takes_shards,
    index_of,
    is_known,
    members_of,
    variables_of,
)
from keras_lso._keras_internals.variables import (
    are_all_of,
    check_not_narrowed,
    have_shapes_of,
    held_by,
    is_overwritten,
    key_of,
    path_of,
    would_keep_tracer,
)

# On JAX, the axes over which gradients are still to be averaged.
AxisName: TypeAlias = str | tuple[str, ...] | None


def _is_array(value: Any) -> bool:
    """Whether the value is a single variable or tensor."""
    # Python can iterate over these too; over a JAX variable it never ends.
    return backend.is_variable(value) or ops.is_tensor(value)


def split_pairs(grads_and_vars: Any) -> tuple[Grads, Variables]:
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
                f"{'The two are swapped. ' if is_swapped else ''}"
                f"It holds: {shown(pair)}"
            )
        grads.append(pair[0])
        variables.append(pair[1])
    return grads, variables


def check_some_gradient(
    optimizer: keras.Optimizer, grads: Grads, variables: Variables
) -> None:
    """Raises an error if all gradients are None, unless there is nothing to train."""
    if any(g is not None for g in grads):
        return
    # A model whose layers are all frozen trains nothing. That is not an error.
    if not optimizer.built or variables_of(optimizer):
        raise ValueError(
            "No gradients provided for any variable: `grads` holds only None, for "
            f"{len(variables)} variables. Compute the gradients of a loss that "
            "depends on `trainable_variables`."
        )


def _check_members(
    optimizer: keras.Optimizer, grads: Grads, variables: Variables
) -> None:
    """Raises an error if a `MultiOptimizer` has a member without any gradient."""
    # Keras raises one too, but only after the members before that one have stepped.
    innermost = chain_of(optimizer)[-1]
    members = members_of(innermost)
    trained = variables_of(innermost) if members else []
    for member in members:
        of_member = [
            (grad, path_of(variable))
            for grad, variable in zip(grads, variables, strict=True)
            if is_known(member, trained[index_of(optimizer, variable)])
        ]
        if of_member and all(grad is None for grad, _ in of_member):
            raise ValueError(
                f"No gradients provided for any variable of {member.name!r}, a member "
                "of the MultiOptimizer. Compute the gradients of a loss that depends "
                "on its variables, or freeze their layers before the optimizer is "
                f"built. Variables: {[path for _, path in of_member]}"
            )


def _check_shape(grad: Tensor, variable: keras.Variable) -> None:
    """Raises an error for a gradient that does not have its variable's shape."""
    # Keras would broadcast a gradient of fewer dimensions, or fail halfway. Inside
    # `jax.shard_map` it knows only the shape of the whole variable.
    shape = ops.convert_to_tensor(variable).shape
    if not _may_be_equal(grad.shape, shape):
        raise ValueError(
            "A gradient must have the shape of its variable: are `grads` in the "
            "order of `trainable_variables`? Received: a gradient of shape "
            f"{tuple(grad.shape)} for the variable {path_of(variable)!r} "
            f"of shape {tuple(shape)}"
        )


def _may_be_equal(shape: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether two shapes are equal, as far as a `tf.function` knows them."""
    if None in (getattr(shape, "rank", 0), getattr(other, "rank", 0)):
        return True
    pairs = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(None in (a, b) or a == b for a, b in pairs)


def as_list(argument: str, values: Any, of_what: str) -> list[Any]:
    """Returns the items of an argument, any iterable except a single tensor."""
    is_other = _is_array(values) or isinstance(values, str | Mapping)
    if is_other or not isinstance(values, Iterable):
        raise refusal(argument, values, f"be a list of {of_what}", TypeError)
    return list(values)


def list_of_gradients(grads: Any) -> list[Any]:
    """Returns the items of an argument `grads`; raises an error if they are pairs."""
    if type(grads) is not list:
        grads = as_list("grads", grads, "gradients, one for each variable")
    # For a thousand gradients, 12 microseconds; a generator would take 39.
    if tuple in set(map(type, grads)):
        raise TypeError(
            "`grads` must hold gradients, not (gradient, variable) pairs. Write "
            f"`optimizer.apply_gradients(pairs)`. Received: {len(grads)} pairs"
        )
    return grads


def check_trainable(variables: Any) -> Variables:
    """Returns a list of trainable variables; raises an error if one cannot train."""
    variables = list_of_variables("variables", variables)
    check_distinct("variables", variables)
    _refuse_complex(variables)
    return variables


def check_variables(argument: str, variables: Any) -> Variables:
    """Returns the variables, at any depth, of an argument of a tf.keras method."""
    variables = list_of_variables(argument, keras.tree.flatten(variables), ValueError)
    check_distinct(argument, variables)
    return variables


def list_of_variables(
    argument: str, variables: Any, error: type[Exception] = TypeError
) -> Variables:
    """Returns the variables in an argument; raises an error for anything else."""
    variables = as_list(argument, variables, "variables")
    for variable in variables:
        if not backend.is_variable(variable):
            raise error(
                f"`{argument}` takes variables only, such as "
                "`model.trainable_variables`. It holds: "
                f"{shown(variable)} of type {type(variable).__name__}"
            )
    return variables


def _refuse_complex(variables: Variables) -> None:
    """Raises an error for complex variables."""
    # A real gradient would train one half of such a variable.
    for variable in variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if "complex" in dtype:
            raise ValueError(
                "A variable that is trained must be real. Train the real and the "
                "imaginary part as two variables of floats, and write `ops.cast(real, "
                f"{dtype!r}) + 1j * ops.cast(imaginary, {dtype!r})` where the model "
                "needs a complex tensor. Received: the variable "
                f"{path_of(variable)!r} of dtype {dtype}"
            )


def check_distinct(argument: str, variables: Variables) -> None:
    """Raises an error if a variable occurs twice, since it would be stepped twice."""
    names: dict = {}
    for variable in variables:
        key, name = key_of(variable), path_of(variable)
        if key in names:
            raise ValueError(
                f"Argument `{argument}` holds a variable twice: {names[key]!r} and "
                f"{name!r} are the same, and would be updated twice per step. Add up "
                "its gradients, and pass the variable once."
            )
        names[key] = name


def pair_gradients(
    optimizer: keras.Optimizer, grads: list[Any], variables: Any
) -> tuple[Grads, Variables]:
    """Pairs gradients and variables, two lists; builds the optimizer if necessary."""
    grads, variables = check_gradients(optimizer, grads, variables)
    some_lack = not grads or type(None) in map(type, grads)
    if some_lack:
        check_some_gradient(optimizer, grads, variables)
    if not optimizer.built:
        optimizer.build(variables)
    if some_lack:
        _check_members(optimizer, grads, variables)
    return grads, variables


def check_gradients(
    optimizer: keras.Optimizer, grads: list[Any], variables: Any
) -> tuple[Grads, Variables]:
    """Pairs gradients, a list, and variables without a change: see `pair_gradients`."""
    are_others = variables is not None and not are_all_of(optimizer, variables)
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                "When passing `grads` without `trainable_variables`, the optimizer "
                "must be built: call `optimizer.build(trainable_variables)` first."
            )
        variables = variables_of(optimizer)
    elif are_others:
        variables = as_list("trainable_variables", variables, "variables")
        are_variables = all(backend.is_variable(v) for v in variables)
        if not are_variables and grads and all(backend.is_variable(g) for g in grads):
            raise TypeError(
                "`grads` holds variables and `trainable_variables` does not: the two "
                "are swapped. Write `optimizer.apply(grads, trainable_variables)`."
            )
        list_of_variables("trainable_variables", variables)
        check_distinct("trainable_variables", variables)
    check_not_narrowed(variables)
    try:
        grads = backend.as_gradients(grads)
    except ValueError:
        _refuse_complex(variables)  # To blame the variables, not the gradients.
        raise
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` and `trainable_variables` must match one-to-one. Received "
            f"{len(grads)} gradients for {len(variables)} variables. Pass None "
            "for a variable without a gradient."
        )
    values = map(held_by, variables)
    grads = backend.replicas.sharded_alike(grads, variables, values)
    if not have_shapes_of(variables, grads):
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None and grad.shape != variable.shape:
                _check_shape(grad, variable)
    if are_others and optimizer.built:
        check_known(optimizer, variables)
    _refuse_tracers(grads, variables)
    return grads, variables


def _refuse_tracers(grads: Grads, variables: Variables) -> None:
    """Raises a `ValueError` if a step would leave tracers of JAX in variables."""
    pairs = zip(variables, grads, strict=True)
    # The first gradient shows it.
    first = next(((v, g) for v, g in pairs if g is not None), None)
    if first is not None and would_keep_tracer(*first):
        raise ValueError(
            "`apply` in a function that JAX compiles would leave tracers in the "
            "variables. Write `optimizer.stateless_apply(optimizer_variables, "
            "grads, trainable_variables)`, which takes and returns values."
        )


def reduce_gradients(
    optimizer: keras.Optimizer, grads: Grads, variables: Variables, axis_name: AxisName
) -> tuple[Grads, bool]:
    """Returns the gradients of all replicas, and whether all replicas now agree."""
    # They are added up before they are measured, since two finite gradients may add up
    # to inf. Values that overwrite their variables are not added up.
    if has_reduced_gradients():
        return grads, False
    is_new_value = [is_overwritten(v) for v in variables]
    pairs = zip(grads, is_new_value, strict=True)
    reduced = [None if is_new else g for g, is_new in pairs]
    reduced = backend.replicas.reduce_gradients(reduced, axis_name)
    if backend.replicas.are_shards(reduced, variables):
        check_takes_shards(optimizer)
    if not any(is_new_value):
        return reduced, True
    return [g if r is None else r for g, r in zip(grads, reduced, strict=True)], False
