"""Keras's variables, and TensorFlow's own where Keras accepts them."""

import contextlib
import operator
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import keras
from keras import ops
from keras.src.backend.common.stateless_scope import (
    get_stateless_scope,
    in_stateless_scope,
)
from keras.src.tree.tree_api import register_tree_node_class

from keras_lso._backend import backend
from keras_lso._backend.host import RecordingScope
from keras_lso._backend.tensors import Tensor, Variables

Pattern: TypeAlias = str | re.Pattern[str]

# For `map`, which takes less time than a comprehension, and calls no Python.
_value_of = operator.attrgetter("_value")
_shape_of, _own_shape_of = map(operator.attrgetter, ("shape", "_shape"))
_dtypes_of = operator.attrgetter("_value.dtype", "_dtype")
_constraint_of = operator.attrgetter("_constraint")
_overwrites = operator.attrgetter("_overwrite_with_gradient")

register_tree_node = register_tree_node_class  # Lets `keras.tree` look into a class.


def storage_of(variables: Variables) -> list[Any]:
    """Returns the storage that an update changes: on PyTorch, the tensors."""
    # Not `variable.value`, whose checks would take longer than the step, and than the
    # arithmetic on its scalars (`read`, `assign`). In a `StatelessScope` the storage is
    # copies, since the values there are the caller's.
    if not backend.UPDATES_IN_PLACE:
        return variables
    if in_stateless_scope():
        return [_copied_in_scope(v) for v in variables]
    return list(map(_value_of, variables))


def live_storage_of(variables: list[Any]) -> list[Any]:
    """Returns the storage that `Framework.copies_of` takes: on PyTorch, tensors."""
    # In a `StatelessScope` it is the variables themselves, which then have the scope's
    # values. For a buffer, `variables` has a `Buffer`.
    if not backend.UPDATES_IN_PLACE or in_stateless_scope():
        return variables
    return [v._value for v in variables]


def read(variable: keras.Variable) -> Tensor:
    """Returns the variable's tensor, which on PyTorch an assignment changes."""
    if backend.UPDATES_IN_PLACE and not in_stateless_scope():
        return variable._value
    if not _has_value(variable):
        raise ValueError(
            "`fit` on JAX keeps the values of the optimizer's variables to itself, so "
            "nothing can read them in `compute_loss`, `call` or a metric. `fit` scales "
            "the loss itself: return it as it is, without `scale_loss`. The callback "
            f"`LossScaleMonitor` shows the scale. Received: {variable.path!r}"
        )
    return ops.convert_to_tensor(variable)


def _has_value(variable: keras.Variable) -> bool:
    """Whether a variable can be read, by itself or in a `StatelessScope`."""
    # One that was made in a scope has an initializer until its end.
    if variable._value is not None or variable._initializer is not None:
        return True
    scope = get_stateless_scope()
    return scope is not None and scope.get_current_value(variable) is not None


def is_frozen(variable: keras.Variable, result: Tensor) -> bool:
    """Whether a trace computes `result` of a variable's value at that moment."""
    if not backend.host.is_constant(held_by(variable), result):
        return False
    scope = get_stateless_scope()
    if scope is None:
        return True
    # A recorded run is repeated, and a caller may give constants as the state.
    is_given = scope.get_current_value(variable) is not None
    return not is_given and not isinstance(scope, RecordingScope)


def would_keep_tracer(variable: keras.Variable, value: Tensor) -> bool:
    """Whether a variable outside of JAX's trace would be assigned a part of it."""
    is_traced = backend.host.is_constant(held_by(variable), value)
    return is_traced and get_stateless_scope() is None


def assign(variable: keras.Variable, value: Tensor) -> None:
    """Assigns a tensor of the variable's shape."""
    if backend.UPDATES_IN_PLACE and not in_stateless_scope():
        variable._value.copy_(value)
    else:
        variable.assign(value)


def have_values(variables: Variables) -> bool:
    """Whether all variables hold values."""
    # Keras's trainer on JAX takes them away until the end of an epoch, and an error in
    # a step deletes them.
    tensors = [v._value for v in variables]
    return not any(t is None or backend.host.is_deleted(t) for t in tensors)


def have_shapes_of(variables: Variables, tensors: list[Tensor]) -> bool:
    """Whether tensors, not None, have exactly the shapes of variables."""
    try:
        shapes = map(_shape_of, tensors), map(_own_shape_of, variables)
        return all(map(operator.eq, *shapes))
    except AttributeError:
        return False


def held_by(variable: Any) -> Any:
    """Returns what a variable holds, whatever a `StatelessScope` has for it."""
    return getattr(variable, "_value", variable)


def key_of(variable: keras.Variable) -> int:
    """Returns a hashable that is equal for variables that change together."""
    held = held_by(variable)
    is_shared = backend.STEPS_WRITE_TENSORS or backend.is_variable(held)
    return id(held if is_shared else variable)


def are_all_of(optimizer: keras.Optimizer, variables: Any) -> bool:
    """Whether a list has the variables that the optimizer was built for, in order."""
    if not optimizer.built or type(variables) is not list:
        return False
    built_for = optimizer._trainable_variables
    is_same_length = len(built_for) == len(variables)
    # For a thousand variables, 10 microseconds; a generator would take 41.
    return is_same_length and all(map(operator.is_, variables, built_for))


def variable_signature(variables: Variables) -> list[Any]:
    """Returns what decides the training of variables, for `==`."""
    try:
        # Two lists: a tuple for each variable would keep the garbage collector busy.
        return [*map(_constraint_of, variables), *map(_overwrites, variables)]
    except AttributeError:  # A `tf.Variable` has neither.
        return [None for _ in variables]


def _copied_in_scope(variable: keras.Variable) -> Tensor:
    """Gives a variable a copy of its value in a `StatelessScope`; returns the copy."""
    variable.assign(backend.detached_copy(variable.value))
    return variable.value


def copy_in_scope(variables: Variables) -> None:
    """Gives variables copies of their values, if these belong to a `StatelessScope`."""
    # There, the tensors that Keras's optimizers write on PyTorch are the caller's.
    if backend.STEPS_WRITE_TENSORS and in_stateless_scope():
        for variable in variables:
            _copied_in_scope(variable)


def memory_for(variables: Variables) -> AbstractContextManager[None]:
    """Returns a context in which placeholders (see `release`) hold assigned values."""
    if backend.STEPS_WRITE_TENSORS and in_stateless_scope():
        # The scope holds assigned values.
        return contextlib.nullcontext()
    return backend.memory_for(variables)


def release(variables: Variables) -> None:
    """Frees the memory of placeholders; see `memory_for`."""
    held = backend.without_memory([v._value for v in variables])
    for variable, value in zip(variables, held, strict=True):
        variable._value = value


def as_stepped(variable: keras.Variable) -> Any:
    """Returns the object for a variable whose name Keras's steps use."""
    # On TensorFlow it is the `tf.Variable` behind the variable. Its name is the path.
    held = held_by(variable)
    return held if backend.is_variable(held) else variable


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layer and its sublayers at any depth."""
    return layer._flatten_layers()


def compute_dtypes_of(model: keras.Model) -> dict[str, str]:
    """Returns a dict of the names of the layers that compute to their dtypes."""
    # A layer that only calls others may have the dtype policy of a later moment.
    return {
        layer.name: layer.compute_dtype
        for layer in layers_of(model)
        if not isinstance(layer, keras.layers.InputLayer)
        if own_variables_of(layer) or layers_of(layer) == [layer]
    }


def layer_in_float16(model: keras.Model) -> str | None:
    """Returns the name of a layer that computes in float16; None if none does."""
    dtypes = compute_dtypes_of(model).items()
    return next((name for name, dtype in dtypes if dtype == "float16"), None)


def computes_in_policies(model: keras.Model) -> bool:
    """Whether only Keras's own code computes in a model, by its dtype policies."""
    # Layers around modules and graphs of the frameworks are elsewhere in Keras.
    modules = "keras.src.layers.", "keras.src.models."
    return all(
        type(layer).__module__.startswith(modules)
        and not isinstance(layer, keras.layers.Lambda)
        for layer in layers_of(model)
    )


def own_variables_of(layer: keras.Layer) -> Variables:
    """Returns the variables of a layer, without those of its sublayers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def copy_of(variable: keras.Variable, dtype: str) -> keras.Variable:
    """Returns a new variable like `variable`, apart from its dtype."""
    # It has the same name and path, by which patterns exclude variables and select
    # their optimizer, and the same constraint and layout.
    copy = _like(variable, dtype, ops.cast, variable.trainable)
    copy.constraint = variable.constraint
    return copy


def zeros_of(
    variable: keras.Variable, dtype: str, block: int = 1, suffix: str = ""
) -> keras.Variable:
    """Returns a new variable of zeros that is not trained, else like `variable`.

    It has one number for each `block` of the last axis.
    """

    def zeros(value: Tensor, dtype: str) -> Tensor:
        return ops.zeros_like(value[..., ::block] if block > 1 else value, dtype)

    return _like(variable, dtype, zeros, trainable=False, block=block, suffix=suffix)


def _like(
    variable: keras.Variable,
    dtype: str,
    values_of: Callable[..., Tensor],
    trainable: bool,
    block: int = 1,
    suffix: str = "",
) -> keras.Variable:
    """Returns a new variable with values made of the values of `variable`."""
    shape = tuple(variable.shape)
    if block > 1:
        shape = *shape[:-1], shape[-1] // block

    def values(shape: tuple[int, ...], dtype: str) -> Tensor:
        new = values_of(ops.convert_to_tensor(variable), dtype)
        # A variable made by the `tf.function` that is being traced has no value yet.
        # The first step synchronises its master.
        return new if new.shape == shape else ops.zeros(shape, dtype)

    layout = getattr(variable, "_layout", None)
    # On JAX Keras compiles what initializes a large variable with a layout, and cannot
    # compile a function. In a scope it calls the function later.
    is_compiled = layout is not None and not backend.UPDATES_IN_PLACE
    is_made_now = is_compiled and not in_stateless_scope()
    with backend.host.outside_of_functions(like=variable):
        copy = keras.Variable(
            values(shape, dtype) if is_made_now else values,
            shape=shape,
            dtype=dtype,
            trainable=trainable,
            layout=layout,
            name=variable.name.rpartition("/")[2].removesuffix(":0") + suffix,
        )
    copy._path = path_of(variable) + suffix
    return copy


# The bits of the mantissa.
_DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


def check_not_narrowed(variables: Variables) -> None:
    """Raises an error for variables whose tensors were cast to fewer digits."""
    # `module.half()` casts the parameters of a PyTorch module in place.
    if not backend.STEPS_WRITE_TENSORS:
        return
    # A few pairs, for any number of variables.
    for dtype, before in set(map(_dtypes_of, variables)):
        now = keras.backend.standardize_dtype(dtype)
        if _DIGITS.get(now, 0) < _DIGITS.get(before, 0):
            variable = next(v for v in variables if _dtypes_of(v) == (dtype, before))
            raise ValueError(
                f"The variable {path_of(variable)!r} was made with dtype {before}, and "
                f"its tensor was cast to {now} since, as `module.half()` and "
                "`module.to(dtype)` do: small steps would be lost. Cast the module "
                "before you make the variables and the optimizer, or cast a copy of "
                "it, `copy.deepcopy(module).half()`."
            )


def path_matches(variable: keras.Variable, patterns: Iterable[Pattern] | None) -> bool:
    """Whether one of the regular expressions is found in the variable's path."""
    return any(is_found(pattern, path_of(variable)) for pattern in patterns or [])


def is_found(pattern: Pattern, name: str) -> bool:
    """Whether a pattern is found in a name, without or with its end `":0"`."""
    # All names of TensorFlow end so, and patterns were written for them. A pattern
    # without a colon must not see that end: `"0$"` would be found in each name.
    name = name.removesuffix(":0")
    if re.search(pattern, name):
        return True
    text = pattern if isinstance(pattern, str) else pattern.pattern
    return ":" in text and bool(re.search(pattern, f"{name}:0"))


def with_and_without_end(patterns: list[str]) -> list[str]:
    """Returns patterns; adds those that end with `":0"` without that end."""
    # Keras's optimizers search names with that end on TensorFlow alone.
    without = [re.sub(r":0\$?(?=$|[|)])", "$", pattern) for pattern in patterns]
    return list(dict.fromkeys([*patterns, *without]))


def path_of(variable: Any) -> str:
    """Returns the variable's path, or the name of a bare `tf.Variable`."""
    return getattr(variable, "path", variable.name)


def is_overwritten(variable: Any) -> bool:
    """Whether the variable takes its gradient as its new value (float8 scales)."""
    # Such a gradient does not come from the loss, so it is never scaled.
    return getattr(variable, "overwrite_with_gradient", False)


def flat_path(variable: Any) -> str:
    """Returns the variable's path in the form in which names of slots start with it."""
    return path_of(variable).replace("/", "_").replace(":", "_")
