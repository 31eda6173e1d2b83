"""Arithmetic on plain tensors in `keras.ops`, which all backends share; their types."""

import collections
import math
import reprlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import keras
from keras import ops

# A `tf.Tensor`, a `jax.Array` or a `torch.Tensor`. The choice depends on an environment
# variable, which no type checker knows.
Tensor: TypeAlias = Any

# A Python number, or a scalar tensor.
Number: TypeAlias = Any

# The gradients of variables, dense or sparse, with None where there is none.
Grads: TypeAlias = list[Tensor | None]

# The variables of a model or an optimizer.
Variables: TypeAlias = list[keras.Variable]

# The step of an optimizer, with these gradients.
StepFunction: TypeAlias = Callable[[Grads], None]

# A `keras.Variable` or, if the backend `UPDATES_IN_PLACE`, the tensor that it holds.
Storage: TypeAlias = Any

# A function whose signature a decorator keeps.
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# A model of any class, for functions that return a model of the same class.
ModelT = TypeVar("ModelT", bound=keras.Model)

# The dtypes whose weights can have masters.
NARROW = ("float16", "bfloat16")
FLOAT16_MAX, FLOAT32_MAX = 65504.0, (2.0 - 2.0**-23) * 2.0**127
# In elements: the size up to which a tensor is small, and the size of a pack.
_SMALL, _PACK = 2**14, 2**16


class _Repr(reprlib.Repr):
    """Writes values for messages: long ones in part, and no numbers of an array."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 20
        self.maxstring = self.maxother = 200

    def repr1(self, x: Any, level: int) -> str:
        if getattr(x, "ndim", None):
            words = type(x).__name__, getattr(x, "path", None)
            name = " ".join(word for word in words if word)
            return f"<{name} of shape {tuple(x.shape)}>"
        return super().repr1(x, level)


# The `repr` of a value that a user gave, for a message.
shown = _Repr().repr


def in_float32(values: Tensor) -> Tensor:
    """Returns `values` in float32, or in float64 if that is their dtype."""
    values = ops.convert_to_tensor(values)
    is_double = keras.backend.standardize_dtype(values.dtype) == "float64"
    return values if is_double else ops.cast(values, "float32")


def is_one(factor: Number) -> bool:
    """Whether a factor is the host's 1.0, by which a product would only copy."""
    return isinstance(factor, float) and factor == 1


def times(values: Tensor, factor: Number) -> Tensor:
    """Returns the product in float32, or in float64 if that is the values' dtype."""
    values = in_float32(values)
    return values if is_one(factor) else values * ops.cast(factor, values.dtype)


def as_real(value: Any, map_values: Callable[..., Tensor]) -> Tensor | None:
    """Returns an item of `Framework.as_gradients`, with its `map_values`."""
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


def amax_of(values: list[Tensor]) -> Tensor:
    """Returns the largest magnitude in a list of dense tensors, in float32."""
    # `ops.max` rejects empty tensors.
    largest = [ops.max(ops.abs(v)) for v in values if 0 not in v.shape]
    if not largest:
        return ops.zeros((), dtype="float32")
    return ops.cast(ops.max(ops.stack(largest)), "float32")


def pack(values: list[Tensor]) -> list[Tensor]:
    """Returns a list of tensors in which small ones of one dtype are concatenated."""
    # Each tensor that is read adds compile time, and each kernel launch adds run time.
    # Copying tensors that fit into the cache costs less.
    large, packs, end = [], collections.defaultdict(list), 0
    for value in values:
        size = _size_of(value)
        if size is None or size > _SMALL:
            large.append(value)
            continue
        end += size
        # An operation takes time even if it changes nothing.
        flat = value if len(value.shape) == 1 else ops.ravel(value)
        packs[value.dtype, end // _PACK].append(flat)
    return large + [ops.concatenate(p) if p[1:] else p[0] for p in packs.values()]


def _size_of(value: Tensor) -> int | None:
    """Returns the number of elements; None if a `tf.function` does not know it yet."""
    shape = value.shape
    is_unknown = getattr(shape, "rank", 0) is None or None in shape
    return None if is_unknown else math.prod(shape)


def map_by_dtype(fn: Callable[[list[Tensor]], list[Tensor]], grads: Grads) -> Grads:
    """Applies `fn` to the tensors of each dtype, as one list; None stays None."""
    positions: dict[str, list[int]] = {}
    for i, g in enumerate(grads):
        if g is not None:
            dtype = keras.backend.standardize_dtype(g.dtype)
            positions.setdefault(dtype, []).append(i)
    results = [None] * len(grads)
    # Sorted, so that all processes use the same order.
    for _, group in sorted(positions.items()):
        for i, result in zip(group, fn([grads[i] for i in group]), strict=True):
            results[i] = result
    return results


def norm_of_all(norms: list[Tensor]) -> Tensor:
    """Returns the L2 norm of all tensors together, given the norm of each."""
    norms = ops.stack([ops.cast(norm, "float32") for norm in norms])
    return ops.sqrt(ops.sum(ops.square(norms)))


# The norms whose squares, and those of their elements, are within float32's range.
USUAL_NORMS = 2.0**-30, 2.0**62
# A norm below this proves that all elements are finite.
PROOF = 2.0**127
# Units for squares, and the magnitude beyond which another unit tells the norm.
_UNITS = (2.0**65, math.inf), (1.0, 2.0**41), (2.0**-75, 2.0**-29)
# A float32 whose square is 0.
_SMALLEST = 2.0**-100


def is_usual(norm: Tensor) -> Tensor:
    """Whether a norm that was computed from plain squares is right."""
    return ops.logical_and(norm > USUAL_NORMS[0], norm < USUAL_NORMS[1])


def joint_norm(
    values: list[Tensor], over_shards: Callable[[Tensor], Tensor] = lambda value: value
) -> Tensor:
    """Returns the L2 norm of all tensors together, a float32 scalar."""
    # The squares of single elements may be outside float32's range. So they are added
    # up in three units, in one read. Within its limit no unit overflows, which would
    # end a program that is debugged for infinities.
    sums = []
    for value in map(in_float32, values):
        parts = [
            ops.abs(ops.clip(value, -limit, limit)) * (1.0 / unit)
            for unit, limit in _UNITS
        ]
        # The selection changes no result. Without it XLA would multiply the constants
        # of the square of a single element first: 0 in the largest unit, inf in the
        # smallest. (Not a maximum, which may lose a NaN on a CPU.)
        parts = [ops.where(part < _SMALLEST, _SMALLEST, part) for part in parts]
        squares = [ops.sum(ops.square(part)) for part in parts]
        sums.append(ops.cast(over_shards(ops.stack(squares)), "float32"))
    totals = ops.sqrt(ops.sum(ops.stack(sums), axis=0))
    large, usual, small = (totals[i] * unit for i, (unit, _) in enumerate(_UNITS))
    norm = ops.where(usual > USUAL_NORMS[0], usual, small)
    return ops.where(large > 2.0**40, large, norm)
