"""Arithmetic on plain tensors in `keras.ops`, which all backends share."""

import collections
import math

import keras
from keras import ops

FLOAT16_MAX = 65504.0
# Numbers of elements: up to how many a tensor is small, and how many make a pack.
_SMALL, _PACK = 2**14, 2**16


def in_float32(values):
    """Returns `values` in float32, or in float64 if that is their dtype."""
    values = ops.convert_to_tensor(values)
    is_double = keras.backend.standardize_dtype(values.dtype) == "float64"
    return values if is_double else ops.cast(values, "float32")


def times(values, factor):
    """Returns the product in float32, or in float64 if that is the values' dtype."""
    values = in_float32(values)
    return values * ops.cast(factor, values.dtype)


def rounded(values, dtype):
    """Does what `Framework.rounded` does."""
    dtype = keras.backend.standardize_dtype(dtype)
    if dtype == "float16":
        values = ops.clip(values, -FLOAT16_MAX, FLOAT16_MAX)
    return ops.cast(values, dtype)


def as_real(value, map_values):
    """Does what `Framework.as_gradient` does, by the framework's `map_values`."""
    if value is None:
        return None
    tensor = value if ops.is_tensor(value) else ops.convert_to_tensor(value)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if "float" in dtype:
        return tensor
    if "complex" in dtype:
        raise ValueError(
            "A gradient must be real: a variable of floats takes no imaginary part. "
            "Differentiate a real loss, or pass `keras.ops.real(gradient)`. Received: "
            f"a gradient of dtype {dtype} and shape {tuple(tensor.shape)}"
        )
    return map_values(in_float32, tensor)


def amax_of(values):
    """Returns the largest magnitude in a list of dense tensors, in float32."""
    # `ops.max` refuses empty tensors.
    largest = [ops.max(ops.abs(v)) for v in values if 0 not in v.shape]
    if not largest:
        return ops.zeros((), dtype="float32")
    return ops.cast(ops.max(ops.stack(largest)), "float32")


def pack(values, size_of=lambda value: math.prod(value.shape)):
    """Concatenates small dense tensors of one dtype, and returns the list of all.

    A compiler needs time for each tensor that is read, and a runtime for each kernel
    that is launched. Copying tensors that fit into the cache takes less.

    Args:
        values: List of dense tensors.
        size_of: Callable of a tensor that returns the number of its elements, or None
            where the shape is not known yet. Defaults to the product of its shape.
    """
    large, packs, end = [], collections.defaultdict(list), 0
    for value in values:
        size = size_of(value)
        if size is None or size > _SMALL:
            large.append(value)
            continue
        end += size
        # An operation takes time even if it changes nothing.
        flat = value if len(value.shape) == 1 else ops.ravel(value)
        packs[value.dtype, end // _PACK].append(flat)
    return large + [ops.concatenate(p) if p[1:] else p[0] for p in packs.values()]


def map_by_dtype(fn, grads):
    """Applies `fn` to the list of all tensors of one dtype; None stays None."""
    positions: dict[str, list[int]] = {}
    for i, g in enumerate(grads):
        if g is not None:
            dtype = keras.backend.standardize_dtype(g.dtype)
            positions.setdefault(dtype, []).append(i)
    results = [None] * len(grads)
    # In the same order on all processes.
    for _, group in sorted(positions.items()):
        for i, result in zip(group, fn([grads[i] for i in group]), strict=True):
            results[i] = result
    return results


def norm_of_all(norms):
    """Returns the L2 norm of all tensors together, of the norm of each."""
    norms = ops.stack([ops.cast(norm, "float32") for norm in norms])
    return ops.sqrt(ops.sum(ops.square(norms)))


def rule_norms(framework, rules, unscaled, targets):
    """Returns `Measurement.rule_norms` of unscaled gradients."""
    return [
        framework.norms_of(rule, g, *of_one)
        for rule, g, of_one in zip(rules, unscaled, targets.states, strict=True)
    ]
