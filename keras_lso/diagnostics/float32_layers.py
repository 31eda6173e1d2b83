"""`keep_in_float32`: a copy of a model whose layers have other dtype policies.

`model_copies.py` makes the copy.
"""

import difflib
import warnings
from collections.abc import Callable, Collection
from typing import Any, Literal

import keras

from keras_lso._backend.types import ModelT
from keras_lso._keras_internals.variables import layers_of
from keras_lso.diagnostics.layer_paths import LayerPaths
from keras_lso.diagnostics.model_copies import copy_of_model

NARROW = ("float16", "bfloat16")
OTHERS = (None, "mixed_float16", "mixed_bfloat16")


def keep_in_float32(
    model: ModelT,
    layers: str | keras.layers.Layer | Collection[str | keras.layers.Layer],
    others: Literal["mixed_float16", "mixed_bfloat16"] | None = None,
) -> ModelT:
    """Returns a copy of a model in which some layers compute in float32.

    The new model has new layers, with the weights, statistics and seed states of the
    old layers. A layer in `layers` keeps all layers inside it in float32 as well, such
    as those of a nested model or of a `MultiHeadAttention`, or the cell of an `LSTM`.
    If the model was compiled, the new model is compiled too, with the same loss and
    metrics, and with a new optimizer from the same config: momenta, the count of steps
    and the loss scale are not carried over. If the model's class overrides `compile`,
    or if an optimizer or a metric has no config, you have to compile the new model
    yourself: a warning says so.

    ```python
    model = keras_lso.keep_in_float32(model, ["embedding", "decoder/attention"])
    ```

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

    Returns:
        A `keras.Model` of the same class. `model` is unchanged.

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
    check_copied(model)
    if others not in OTHERS:
        raise ValueError(
            "`others` must be 'mixed_float16', 'mixed_bfloat16' or None. "
            f"Received: others={others!r}"
        )
    paths = LayerPaths(model)
    kept = paths_inside(paths, layers)
    policies = {
        id(layer): _policy(layer, path in kept, others)
        for path, layer in paths.layers.items()
    }
    return copied(model, policies)


def copied(
    model: ModelT,
    policies: dict[int, str | None],
    optimizer_like: Callable[[Any], Any] | None = None,
) -> ModelT:
    """Returns a copy of a model, and warns of dtype policies that a file would lose.

    Args:
        model: A `keras.Model` that is built.
        policies: See `copy_of_model`.
        optimizer_like: See `copy_of_model`. Defaults to `None`.
    """
    copy, unsaved = copy_of_model(model, policies, optimizer_like)
    if unsaved:
        warnings.warn(
            f"Saved files will not hold the dtype policies of {unsaved}, since the "
            "config of the layer or model that makes them does not. In its "
            "`__init__` pass `dtype` on to them, or remake the model after loading, "
            "by `keep_in_float32` or `apply`.",
            stacklevel=3,
        )
    return copy


def check_copied(model: Any) -> None:
    """Raises an error if a model cannot be copied."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model. "
            f"Received: model={model!r} of type {type(model).__name__}"
        )
    check_not_quantized(model)
    if not model.built:
        raise ValueError(
            "`model` must be built, so that it has weights to keep: call it on a batch "
            f"first. Received: model={model!r}"
        )


def check_not_quantized(model: keras.Model) -> None:
    """Raises a `ValueError` for a model with quantized layers."""
    for layer in layers_of(model):
        if layer.quantization_mode is not None:
            raise ValueError(
                "`model` must not be quantized: the weights of a quantized layer are "
                "not floating-point numbers. Take the model from before `quantize`. "
                f"Received a layer {layer.name!r} with the dtype policy "
                f"{layer.dtype_policy.name!r}"
            )


def _policy(layer, is_kept, others):
    """Returns the name of a layer's new dtype policy; None if it keeps its own."""
    if is_kept:
        return "float32" if layer.compute_dtype in NARROW else None
    if others is not None and layer.compute_dtype in ("float32", "bfloat16"):
        return others
    return None


# --- Which layers -------------------------------------------------------------------


def paths_inside(paths: LayerPaths, layers: Any) -> set[str]:
    """Returns the paths of the requested layers and of the layers inside them."""
    wanted = [layers] if isinstance(layers, str | keras.layers.Layer) else layers
    if not isinstance(wanted, list | tuple | set):
        raise TypeError(
            "`layers` must be a list of names, paths or layers. "
            f"Received: layers={layers!r} of type {type(layers).__name__}"
        )
    kept = set()
    for item in wanted:
        kept.update(paths.inside(_path_of(paths, item)))
    return kept


def _path_of(paths, item):
    if isinstance(item, keras.layers.Layer):
        path = paths.path_of(item)
        if path is None:
            raise ValueError(
                "`layers` must hold layers of `model`: this one is not in it. "
                f"Received: {item!r}"
            )
        return path
    if not isinstance(item, str):
        raise TypeError(
            "`layers` must be a list of names, paths or layers. "
            f"Received: {item!r} of type {type(item).__name__}"
        )
    if item in paths.layers:
        return item
    if item in paths.aliases:
        return paths.path_of(paths.aliases[item])
    named = [path for path, layer in paths.layers.items() if layer.name == item]
    if len(named) == 1:
        return named[0]
    if named:
        raise ValueError(
            f"`layers` must be unambiguous, but several layers are called {item!r}. "
            f"Write one of the paths {named}, or pass the layer object."
        )
    near = difflib.get_close_matches(item, paths.layers, n=3, cutoff=0.4)
    raise ValueError(
        f"`layers` must hold names, paths or layers of the model, which has no {item!r}"
        f". Similar are: {near or list(paths.layers)[:10]}"
    )
