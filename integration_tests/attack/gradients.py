"""Gradients of any dtype and memory layout, with what NumPy knows of them."""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from integration_tests.attack.execution import BACKEND, array, tensor
from testing.tensors import sparse_gradient

# A gradient of the last one has some rows twice.
LAYOUTS = {
    "torch": ["transposed", "strided", "expanded", "negative", "sparse", "repeated"],
    "tensorflow": ["sparse", "repeated"],
    "jax": ["sparse"],
}[BACKEND]
NOT_FINITE = [math.inf, -math.inf, math.nan]


@dataclasses.dataclass
class Gradient:
    """A gradient, and its elements."""

    tensor: Any
    shape: tuple
    values: np.ndarray
    rows: np.ndarray | None

    @property
    def may_overflow_in_its_dtype(self):
        """Whether repeated rows may be inf once they are summed in float16."""
        dtype = str(self.tensor.dtype)
        if self.rows is None or "float16" not in dtype or "bfloat16" in dtype:
            return False
        sums = np.zeros(self.shape)
        np.add.at(sums, self.rows, np.abs(self.values, dtype="float64"))
        return bool(sums.max(initial=0) > 6e4)

    def bits(self):
        """Returns the contents of the caller's memory."""
        return [_bytes(value) for value in _memory(self.tensor)]

    @np.errstate(over="ignore", invalid="ignore")
    def times(self, factor):
        """Returns the product with a float32, a dense array."""
        if self.rows is None:
            dense = np.broadcast_to(self.values, self.shape)
        else:
            dense = np.zeros(self.shape, self.values.dtype)
            np.add.at(dense, self.rows, self.values)
        return np.asarray(dense * factor, self.values.dtype)

    @np.errstate(over="ignore", invalid="ignore")
    def sparse_times(self, factor, dense):
        """Returns the product as a sparse tensor, or else the dense one."""
        if self.rows is None:
            return dense
        values = np.asarray(self.values * factor, self.values.dtype)
        return _make(values, values.dtype.name, "sparse", self.rows, self.shape)


def is_sparse(value):
    """Whether a tensor is a sparse one, of any backend."""
    is_others = hasattr(value, "dense_shape") or hasattr(value, "todense")
    return is_others or getattr(value, "is_sparse", False)


def _memory(value):
    """Returns the tensors in which a gradient is stored."""
    if not is_sparse(value):
        base = getattr(value, "_base", None)
        return [value if base is None else base]
    if BACKEND == "torch":
        return [value._values(), value._indices()]
    return [value.data if BACKEND == "jax" else value.values, value.indices]


def _bytes(value):
    # Each number of a dtype is one of float64.
    return array(value.double() if BACKEND == "torch" else value).tobytes()


def gradient(random, shape, dtype, layout, size, bad):
    """Returns a `Gradient`, one element of which is `bad` unless that is None."""
    if not shape or not math.prod(shape):
        layout = "plain"
    rows, of_values = None, shape
    if layout in ("sparse", "repeated"):
        count = random.integers(1, shape[0] + 1)
        rows = random.choice(shape[0], count, replace=layout == "repeated")
        of_values = (count, *shape[1:])
    elif layout == "expanded":
        of_values = (1, *shape[1:])
    values = random.normal(size=of_values)
    if layout == "repeated":
        # In any order and 16-bit dtype their sums are exact.
        size = 2.0 ** np.round(np.log2(size or 1.0)) / 8
        values = np.round(8 * values)
    values = np.asarray(values * size)
    if bad is not None and values.size:
        values.flat[random.integers(values.size)] = bad
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(getattr(ml_dtypes, dtype, dtype))
    wide = values.astype("float64" if dtype == "float64" else "float32")
    return Gradient(_make(wide, dtype, layout, rows, shape), shape, wide, rows)


def _make(values, dtype, layout, rows, shape):
    """Returns a tensor of this layout."""
    made = tensor(values, dtype)
    if rows is None:
        return made if layout == "plain" else _view(made, layout, shape)
    made = sparse_gradient(made, rows, shape)
    if BACKEND == "jax":
        # Under `jit` Keras's Adam squares only such gradients.
        made.unique_indices = True
    return made.coalesce() if (BACKEND, layout) == ("torch", "sparse") else made


def _view(made, layout, shape):
    """Returns a tensor of PyTorch whose elements are not those of its memory."""
    import torch

    if layout == "transposed":
        backwards = tuple(reversed(range(made.ndim)))
        return made.permute(backwards).contiguous().permute(backwards)
    if layout == "strided":
        memory = torch.zeros((*made.shape, 3), dtype=made.dtype)
        memory[..., 1] = made
        return memory[..., 1]
    return made.expand(shape) if layout == "expanded" else torch._neg_view(-made)
