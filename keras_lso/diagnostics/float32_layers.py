"""`keep_in_float32`: a copy of a model whose layers have other dtype policies."""

import inspect
import tempfile
from collections.abc import Callable, Collection
from typing import Any, Literal

import keras
from keras import ops, tree

from keras_lso._backend.tensors import NARROW, ModelT
from keras_lso._core.checks import refusal, warn
from keras_lso._keras_internals.layers import (
    children_of,
    compile_arguments,
    configs_trusted,
    is_graph,
    lambda_like,
)
from keras_lso._keras_internals.optimizers import attributes_set
from keras_lso._keras_internals.variables import layers_of
from keras_lso.diagnostics.reports import LayerPaths, check_model

FLOATS = ("float32", *NARROW)


def keep_in_float32(
    model: ModelT,
    layers: str | keras.layers.Layer | Collection[str | keras.layers.Layer],
    others: Literal["mixed_float16", "mixed_bfloat16"] | None = None,
) -> ModelT:
    """Returns a copy of a model in which some layers compute in float32.

    The new model has new layers, with the weights, statistics and seed states of the
    old layers. A layer in `layers` keeps all layers inside it in float32 as well, such
    as those of a nested model or the cell of an `LSTM`. If the model was compiled, the
    new model is too, with the same loss and metrics, and with a new optimizer from the
    same config: momenta, the count of steps and the loss scale are not carried over. If
    the class overrides `compile`, or an optimizer or a metric has no config, a warning
    says that you have to compile the new model yourself.

    Saved files hold only the dtype policies in the layers' configs. If your own layer
    creates sublayers without passing its `dtype` to them, a loaded model loses their
    dtype policies: a warning names such layers.

    Args:
        model: A `keras.Model` that is built: `Sequential`, functional, or subclassed
            with a `get_config`.
        layers: Names, paths or layer objects, or one of these. A path consists of the
            names of the enclosing layers and the layer's own name, such as
            `"encoder/dense"`, as in a `float16_report`.
        others: The dtype policy of all other layers that compute in float32 or
            bfloat16, `"mixed_float16"` or `"mixed_bfloat16"`. Defaults to `None`: they
            keep their dtype policies.

    Raises:
        TypeError: If `model` is not a `keras.Model`, or `layers` has another type.
        ValueError: If there is no such layer, or several layers have this name; if the
            model is not built, cannot be created from its config, or is quantized; if
            `others` is not valid.

    Example:

    >>> import keras, keras_lso
    >>> layers = [keras.layers.Dense(2, name="first"), keras.layers.Dense(1)]
    >>> model = keras.Sequential([keras.Input((3,)), *layers])
    >>> mixed = keras_lso.keep_in_float32(model, "first", others="mixed_float16")
    >>> [layer.dtype_policy.name for layer in mixed.layers]
    ['float32', 'mixed_float16']
    """
    if others not in (None, "mixed_float16", "mixed_bfloat16"):
        requirement = "be 'mixed_float16', 'mixed_bfloat16' or None"
        raise refusal("others", others, requirement)
    return copied(model, policies_of(model, layers, others))


def policies_of(
    model: keras.Model,
    in_float32: Any,
    others: str | None,
    replaced: Collection[str] = ("float32", "bfloat16"),
) -> dict[int, Any]:
    """Returns the dtype policy of the copy of each layer, by the layer's id."""
    check_model(model)
    paths = LayerPaths(model)
    is_list = isinstance(in_float32, list | tuple | set)
    items = in_float32 if is_list else [in_float32]
    inside = {path for item in items for path in paths.inside(paths.find(item))}
    policies = {}
    for path, layer in paths.layers.items():
        new, old = ("float32", NARROW) if path in inside else (others, replaced)
        is_new = new is not None and layer.compute_dtype in old
        policies[id(layer)] = new if is_new else layer.dtype_policy
    return policies


def copied(
    model: ModelT,
    policies: dict[int, Any],
    optimizer_like: Callable[[Any], Any] | None = None,
) -> ModelT:
    """Returns a copy of a model, and warns of dtype policies that a file would lose."""
    if not model.built:
        raise ValueError(
            "`model` must be built, so that it has weights to keep: call it on a batch "
            f"first. Received: model={model!r}"
        )
    classes = {type(layer).__name__: type(layer) for layer in layers_of(model)}
    with keras.saving.custom_object_scope(classes):
        copies = _Copies(policies)
        copy = copies.copy_of(model)
        if not copy.built:
            copy.build_from_config(model.get_build_config())
        pairs = _pairs(model, copy)
        _check_alike(model, copy, pairs)
        for old, new in pairs:
            _set_policy(new, old, policies)
        unsaved = copies.unsaved()
    for old, new in pairs:
        # For a model, this also sets all its layers, which come later in the list.
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    for old, new in zip(model.variables, copy.variables, strict=True):
        # Copied, since JAX's `fit` gives away the arrays of its model.
        new.assign(ops.cast(ops.copy(old), new.dtype))
    for old, new in pairs:
        _copy_lookups(old, new)
    if model.compiled and type(model).compile is keras.Model.compile:
        _compile_like(copy, model, optimizer_like)
    if unsaved:
        paths = LayerPaths(copy)
        warn(
            "Saved files will not hold the dtype policies of "
            f"{[paths.path_of(layer) for layer in unsaved]}, since the config of the "
            "layer or model that makes them does not. In its `__init__` pass `dtype` "
            "on to them, or remake the model after loading, by `keep_in_float32` or "
            "`apply`."
        )
    return copy


class _Copies:
    """The new layers, one for each old layer."""

    def __init__(self, policies: dict[int, Any]) -> None:
        self.policies = policies
        self._copies: dict[int, Any] = {}
        self._of_configs: list[Any] = []

    def copy_of(self, layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):  # An op between layers.
            return type(layer).from_config(layer.get_config())
        if id(layer) not in self._copies:
            if is_graph(layer):
                with attributes_set([(layer, "compiled", False)]):
                    copy = keras.models.clone_model(layer, clone_function=self.copy_of)
            else:
                copy = self._of_config(layer)
            self._copies[id(layer)] = copy
        return self._copies[id(layer)]

    def _of_config(self, layer: keras.Layer) -> keras.Layer:
        """Returns the copy of a layer that Keras cannot clone layer by layer."""
        try:
            copy = made_again(layer)
        except (NotImplementedError, TypeError) as error:
            name = type(layer).__name__
            raise ValueError(
                f"`model` must be remade from its config, but {name} cannot. Write a "
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
        pairs = [
            pair
            for copy in self._of_configs
            if children_of(copy)
            for pair in _pairs(copy, made_again(copy))
        ]
        return list(dict.fromkeys(a for a, b in pairs if _dtypes(a) != _dtypes(b)))


def made_again(value: Any) -> Any:
    """Returns a layer, metric or optimizer from its config and its own functions."""
    # A config has only the name of a function, or the code of a lambda.
    if isinstance(value, keras.layers.Lambda):
        return lambda_like(value)
    with configs_trusted(), keras.saving.custom_object_scope(_named(value)):
        config = _unbuilt(value.get_config())
        for key in config.keys() & vars(value).keys():
            if getattr(vars(value)[key], "__name__", "") == "<lambda>":
                config[key] = vars(value)[key]
        return type(value).from_config(config)


def _named(value: Any) -> dict[str, Any]:
    """Returns the functions and classes in a config that Keras does not find itself."""
    kinds = keras.Initializer, keras.Regularizer, keras.constraints.Constraint
    parts = vars(value).values()
    named: list[Any] = [type(value), *(type(v) for v in parts if isinstance(v, kinds))]
    named += [v for v in parts if inspect.isfunction(v)]
    return {v.__name__: v for v in named if not v.__module__.startswith("keras.")}


def _unbuilt(config: Any) -> Any:
    """Returns a config whose inner layers are created without their weights."""
    if isinstance(config, list):
        return [_unbuilt(item) for item in config]
    if not isinstance(config, dict):
        return config
    left_out = ["build_config"] if "class_name" in config else []
    return {k: _unbuilt(v) for k, v in config.items() if k not in left_out}


_Pairs = list[tuple[keras.Layer, keras.Layer]]


def _pairs(old: keras.Layer, new: keras.Layer) -> _Pairs:
    """Returns the layers and their counterparts, as far as these exist."""
    pairs: dict[int, tuple[keras.Layer, keras.Layer]] = {}
    ahead = [(old, new)]
    while ahead:
        old, new = ahead.pop()
        if id(old) not in pairs:
            pairs[id(old)] = old, new
            olds, news = children_of(old), children_of(new)
            if [type(v) for v in olds] == [type(v) for v in news]:
                ahead += reversed(list(zip(olds, news, strict=True)))
    return list(pairs.values())


def _dtypes(layer_or_policy: Any) -> tuple[str, str]:
    """Returns the dtypes in which a layer computes, and holds its variables."""
    return layer_or_policy.compute_dtype, layer_or_policy.variable_dtype


def _set_policy(new: keras.Layer, old: keras.Layer, policies: dict[int, Any]) -> None:
    """Gives the copy of a layer its dtype policy."""
    policy = keras.dtype_policies.get(policies[id(old)])
    if _dtypes(new) != _dtypes(policy):
        new.dtype_policy = policy


def _check_alike(model: keras.Model, copy: keras.Model, pairs: _Pairs) -> None:
    """Raises an error if a copy has other layers or variables."""
    shapes = [[tuple(v.shape) for v in m.variables] for m in (model, copy)]
    if len(pairs) != len(layers_of(model)) or shapes[0] != shapes[1]:
        name = type(model).__name__
        raise ValueError(
            "`model` must be remade from its config, but the result has other layers "
            f"or weights. Make `{name}.get_config` return the arguments of "
            f"`__init__`, and write a `build`. Received: model={model!r}"
        )


def _copy_lookups(old: keras.Layer, new: keras.Layer) -> None:
    """Copies the results of `adapt`: tables, and tensors derived from variables."""
    if hasattr(old, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            new.load_assets(folder)
    if hasattr(new, "finalize_state"):
        new.finalize_state()


def _compile_like(
    copy: keras.Model, model: keras.Model, optimizer_like: Callable[[Any], Any] | None
) -> None:
    """Compiles a copy with new objects like the model's, or warns if it cannot."""
    arguments = compile_arguments(model)
    try:
        for key in ("optimizer", "metrics", "weighted_metrics"):
            arguments[key] = tree.map_structure(_fresh, arguments[key])
        if optimizer_like is not None:
            arguments["optimizer"] = optimizer_like(model.optimizer)
    except (NotImplementedError, TypeError, ValueError) as error:
        warn(
            "The new model is not compiled: call its `compile`. An optimizer or metric "
            f"of `model` cannot be remade from its config: {error}"
        )
        return
    # A model without Keras's loss scaling has none in the copy either.
    is_mixed = model.dtype_policy.name == "mixed_float16"
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    copy.compile(**arguments, auto_scale_loss=is_scaled or not is_mixed)


def _fresh(value: Any) -> Any:
    """Returns a new optimizer or metric from the same config; names stay names."""
    kinds = keras.optimizers.Optimizer, keras.metrics.Metric
    return made_again(value) if isinstance(value, kinds) else value
