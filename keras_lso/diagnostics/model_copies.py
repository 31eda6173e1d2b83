"""Copies a model with other dtype policies: from its configs, with its weights.

A functional or `Sequential` model is cloned layer by layer, so that a layer that is in
several nested models stays one layer. Everything else is created from its config.
"""

import inspect
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from keras_lso._backend.types import ModelT
from keras_lso._keras_internals.layers import (
    children_of,
    compile_arguments,
    configs_trusted,
    is_graph,
    lambda_like,
    not_compiled,
)
from keras_lso._keras_internals.variables import layers_of
from keras_lso.diagnostics.layer_paths import LayerPaths


def copy_of_model(
    model: ModelT,
    policies: dict[int, str | None],
    optimizer_like: Callable[[Any], Any] | None = None,
) -> tuple[ModelT, list[str | None]]:
    """Returns a copy of a model, and the layers whose dtypes a file would lose.

    Args:
        model: A built `keras.Model`.
        policies: Dict of ids of its layers to the name of a dtype policy, or to None
            if the layer keeps its own.
        optimizer_like: Callable that takes the model's optimizer and returns the
            optimizer of the copy. Defaults to `None`: one of the same config.

    Returns:
        Tuple of the new model and the list of paths of layers whose dtype policies are
        in no config.

    Raises:
        ValueError: If a layer or the model cannot be created from its config.
    """
    classes = {type(layer).__name__: type(layer) for layer in layers_of(model)}
    with keras.saving.custom_object_scope(classes):
        copies = _Copies(policies)
        copy = copies.copy_of(model)
        _build_like(copy, model)
        pairs = _pairs(model, copy)
        _check_alike(model, copy, pairs)
        for old, new in pairs:
            _set_policy(new, old, policies)
        unsaved = copies.unsaved()
    for old, new in pairs:
        # For a model, this also sets all its layers, which come later in the list.
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    _copy_values(model, copy)
    for old, new in pairs:
        _copy_lookups(old, new)
    if model.compiled and type(model).compile is keras.Model.compile:
        _compile_like(copy, model, optimizer_like)
    paths = LayerPaths(copy)
    return copy, [paths.path_of(layer) for layer in unsaved]


class _Copies:
    """The new layers, one for each old layer."""

    def __init__(self, policies: dict[int, str | None]) -> None:
        self.policies = policies
        self._copies: dict[int, Any] = {}
        self._of_configs: list[Any] = []

    def copy_of(self, layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):  # An op between layers.
            return type(layer).from_config(layer.get_config())
        if id(layer) not in self._copies:
            make = self._clone if is_graph(layer) else self._of_config
            self._copies[id(layer)] = make(layer)
        return self._copies[id(layer)]

    def _clone(self, model):
        with not_compiled(model):
            return keras.models.clone_model(model, clone_function=self.copy_of)

    def _of_config(self, layer):
        try:
            copy = made_again(layer)
        except (NotImplementedError, TypeError) as error:
            name = type(layer).__name__
            has = "has none" if isinstance(error, NotImplementedError) else "lacks some"
            raise ValueError(
                f"`model` must be remade from its config, but {name} {has}. Write a "
                f"`get_config` that returns the arguments of `{name}.__init__`. "
                f"Received: {layer!r}, and the error: {error}"
            ) from error
        # Set now, since `build` creates the weights in the dtype of the dtype policy.
        for old, new in _pairs(layer, copy):
            _set_policy(new, old, self.policies)
        self._of_configs.append(copy)
        return copy

    def unsaved(self) -> list[Any]:
        """Returns the layers whose dtype policy a config forgets."""
        found = []
        for copy in self._of_configs:
            if children_of(copy):
                again = made_again(copy)
                found += [a for a, b in _pairs(copy, again) if _dtypes(a) != _dtypes(b)]
        return list(dict.fromkeys(found))


def made_again(value: Any) -> Any:
    """Returns a layer, metric or optimizer created from its config.

    The user's functions are taken from `value` itself. A config holds only the name of
    a function, or the code of a lambda, which Keras can seldom turn back into one.
    """
    if isinstance(value, keras.layers.Lambda):
        return lambda_like(value)
    with configs_trusted(), keras.saving.custom_object_scope(_named(value)):
        config = _unbuilt(value.get_config())
        for key in config.keys() & vars(value).keys():
            if getattr(vars(value)[key], "__name__", "") == "<lambda>":
                config[key] = vars(value)[key]
        return type(value).from_config(config)


def _named(value):
    """Returns the functions and classes (such as regularizers) in a config, by name.

    Keras finds its own without this.
    """
    kinds = keras.Initializer, keras.Regularizer, keras.constraints.Constraint
    named: dict = {type(value).__name__: type(value)}
    for part in vars(value).values():
        if isinstance(part, kinds):
            named[type(part).__name__] = type(part)
        elif inspect.isfunction(part):
            named[part.__name__] = part
    return {k: v for k, v in named.items() if not v.__module__.startswith("keras.")}


def _unbuilt(config):
    """Returns a config whose inner layers are created without their weights."""
    if isinstance(config, dict):
        is_layer = "class_name" in config
        return {
            key: _unbuilt(value)
            for key, value in config.items()
            if not (is_layer and key == "build_config")
        }
    return [*map(_unbuilt, config)] if isinstance(config, list) else config


def _pairs(old, new):
    """Returns a list of layers and their counterparts, as far as these exist.

    Some layers create their inner layers only when they are built.
    """
    found, ahead, seen = [], [(old, new)], set()
    while ahead:
        pair = ahead.pop()
        if id(pair[0]) not in seen:
            seen.add(id(pair[0]))
            found.append(pair)
            inside = [children_of(layer) for layer in pair]
            if [type(v) for v in inside[0]] == [type(v) for v in inside[1]]:
                ahead += reversed(list(zip(*inside, strict=True)))
    return found


def _dtypes(layer):
    return layer.compute_dtype, layer.variable_dtype


def _set_policy(new, old, policies):
    name = policies[id(old)]
    policy = old.dtype_policy if name is None else keras.dtype_policies.get(name)
    wanted = _dtypes(old) if name is None else _dtypes_of(policy)
    if _dtypes(new) != wanted:
        new.dtype_policy = policy


def _dtypes_of(policy):
    return policy.compute_dtype, policy.variable_dtype


def _build_like(copy, model):
    if not copy.built:
        copy.build_from_config(model.get_build_config())


def _check_alike(model, copy, pairs):
    """Raises an error if a copy has other layers or variables."""
    shapes = [[tuple(v.shape) for v in m.variables] for m in (model, copy)]
    if len(pairs) != len(layers_of(model)) or shapes[0] != shapes[1]:
        name = type(model).__name__
        raise ValueError(
            "`model` must be remade from its config, but the result has other layers "
            f"or weights. Make `{name}.get_config` return the arguments of "
            f"`__init__`, and write a `build`. Received: model={model!r}"
        )


def _copy_values(model, copy):
    for old, new in zip(model.variables, copy.variables, strict=True):
        # Copied, since JAX's `fit` gives away the arrays of its model.
        new.assign(ops.cast(ops.copy(old), new.dtype))


def _copy_lookups(old, new):
    """Copies the results of `adapt`: tables, and tensors derived from variables."""
    if hasattr(old, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            new.load_assets(folder)
    if hasattr(new, "finalize_state"):
        new.finalize_state()


def _compile_like(copy, model, optimizer_like):
    arguments = compile_arguments(model)
    try:
        for key in ("optimizer", "metrics", "weighted_metrics"):
            arguments[key] = tree.map_structure(_fresh, arguments[key])
        if optimizer_like is not None:
            arguments["optimizer"] = optimizer_like(model.optimizer)
    except (NotImplementedError, TypeError, ValueError) as error:
        warnings.warn(
            "The new model is not compiled: call its `compile`. An optimizer or metric "
            f"of `model` cannot be remade from its config: {error}",
            stacklevel=5,
        )
        return
    # A model without Keras's loss scaling has none in the copy either.
    is_mixed = model.dtype_policy.name == "mixed_float16"
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    copy.compile(**arguments, auto_scale_loss=is_scaled or not is_mixed)


def _fresh(value):
    """Returns a new optimizer or metric from the same config; names stay names."""
    if isinstance(value, keras.optimizers.Optimizer | keras.metrics.Metric):
        return made_again(value)
    return value
