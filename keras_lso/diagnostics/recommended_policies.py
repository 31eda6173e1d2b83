"""The layers of a recommendation, and the dtype policy that each of them gets."""

import keras

from keras_lso.diagnostics.float32_layers import NARROW, paths_inside
from keras_lso.diagnostics.layer_paths import LayerPaths
from keras_lso.diagnostics.recommended_optimizers import kind_of_masters
from keras_lso.diagnostics.training_bytes import owners_of, weight_dtype

# The dtype policies under which weights are in float32.
WIDE_WEIGHTS = ("float32", "mixed_float16", "mixed_bfloat16")


def weights_of_16_bits(model: keras.Model) -> str | None:
    """Returns the dtype of the weights that have 16 bits; None if there are none."""
    dtypes = {keras.backend.standardize_dtype(v.dtype) for v in model.weights}
    return next((dtype for dtype in NARROW if dtype in dtypes), None)


def in_float32_already(paths: LayerPaths) -> list[str]:
    """Returns the paths of the layers that compute in float32 in a 16-bit model."""
    layers = paths.layers
    if not any(layer.compute_dtype in NARROW for layer in layers.values()):
        return []
    wide = {
        path
        for path in paths.parents
        # An `InputLayer` computes nothing.
        if not isinstance(layers[path], keras.layers.InputLayer)
        and all(layers[p].compute_dtype == "float32" for p in paths.inside(path))
    }
    return outermost(paths, wide)


def outermost(paths: LayerPaths, wanted: set[str]) -> list[str]:
    """Returns the paths that are inside no other path, in the model's order."""
    inside = {p for path in wanted for p in paths.inside(path) if p != path}
    return [path for path in paths.layers if path in wanted and path not in inside]


def policies_of(
    paths: LayerPaths, policy: str, in_float32: list[str]
) -> dict[int, str | None]:
    """Returns the name of the dtype policy that each layer gets, by the layer's id.

    The name is None if the layer keeps its own, as layers with 16-bit weights do.

    Args:
        paths: `LayerPaths` of the model.
        policy: String, the recommended dtype policy.
        in_float32: List of the paths of layers that still compute in float32.
    """
    kept = paths_inside(paths, in_float32)
    target = policy if policy in WIDE_WEIGHTS else None
    found: dict[int, str | None] = {}
    for path, layer in paths.layers.items():
        computes = layer.compute_dtype
        if computes not in ("float32", *NARROW):
            found[id(layer)] = None
        elif path in kept:
            found[id(layer)] = "float32" if computes in NARROW else None
        else:
            is_same = target == layer.dtype_policy.name
            found[id(layer)] = None if is_same else target
    return found


def masters_of(model: keras.Model, policies: dict[int, str | None]) -> str | None:
    """Returns the kind of master weights; None if no trained weight needs a master."""
    dtypes = {
        weight_dtype(variable, layer, policies[id(layer)])
        for variable, layer in owners_of(model)
        if variable.trainable
    }
    return (
        kind_of_masters(getattr(model, "optimizer", None))
        if dtypes & set(NARROW)
        else None
    )
