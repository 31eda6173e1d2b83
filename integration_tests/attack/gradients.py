"""Gradients of any dtype and memory layout, with what NumPy knows of them."""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from integration_tests.attack.cases import BACKEND
from integration_tests.attack.execution import array

LAYOUTS = {
    "torch": ["transposed", "strided", "expanded", "negative", "sparse", "twice"],
    "tensorflow": ["sparse", "twice"],
    "jax": ["sparse"],
}[BACKEND]
NOT_FINITE = [np.inf, -np.inf, np.nan]


@dataclasses.dataclass
class Gradient:
    """A gradient, and its elements."""

    tensor: Any
    memory: list
    shape: tuple
    values: np.ndarray
    rows: np.ndarray | None

    @property
    def may_overflow_in_its_dtype(self):
        """Whether rows that come twice may be inf once they are summed in float16."""
        dtype = str(self.tensor.dtype)
        if self.rows is None or "float16" not in dtype or "bfloat16" in dtype:
            return False
        sums = np.zeros(self.shape)
        np.add.at(sums, self.rows, np.abs(self.values, dtype="float64"))
        return bool(sums.max(initial=0) > 6e4)

    def bits(self):
        """Returns what the caller's memory holds."""
        return [_bytes(tensor) for tensor in self.memory]

    @np.errstate(over="ignore", invalid="ignore")
    def times(self, factor):
        """Returns the product with a float32, a dense array."""
        dense = np.broadcast_to(self.values, self.shape) if self.rows is None else None
        if dense is None:
            dense = np.zeros(self.shape, self.values.dtype)
            np.add.at(dense, self.rows, self.values)
        return np.asarray(dense * factor, self.values.dtype)

    @np.errstate(over="ignore", invalid="ignore")
    def sparse_times(self, factor, dense):
        """Returns the product as a sparse tensor, or else the dense one."""
        if self.rows is None:
            return dense
        values = np.asarray(self.values * factor, self.values.dtype)
        return _make(values, values.dtype.name, "sparse", self.rows, self.shape)[0]


def _bytes(tensor):
    # Each number of a dtype is one of float64.
    if BACKEND == "torch":
        tensor = tensor.double().resolve_neg()
    return array(tensor).tobytes()


def is_sparse(tensor):
    """Whether a tensor is a sparse one, of any backend."""
    is_others = hasattr(tensor, "dense_shape") or hasattr(tensor, "todense")
    return is_others or getattr(tensor, "is_sparse", False)


def layout(random, shape, is_compiled):
    """Returns the name of a layout that a gradient of that shape may have."""
    is_plain = not shape or not math.prod(shape) or random.random() < 0.5
    # Keras's sums refuse sparse ones under `jax.jit`.
    is_plain = is_plain or (is_compiled and BACKEND == "jax")
    return "plain" if is_plain else LAYOUTS[random.integers(len(LAYOUTS))]


def gradient(random, shape, dtype, layout, size, is_bad):
    """Returns a `Gradient`."""
    rows, of_values = None, shape
    if layout in ("sparse", "twice"):
        count = random.integers(1, shape[0] + 1)
        rows = random.choice(shape[0], count, replace=layout == "twice")
        of_values = (count, *shape[1:])
    elif layout == "expanded":
        of_values = (1, *shape[1:])
    values = random.normal(size=of_values)
    if layout == "twice":
        # In any order and 16-bit dtype their sums are exact.
        size = 2.0 ** np.round(np.log2(size or 1.0)) / 8
        values = np.round(8 * values)
    values = np.asarray(values * size)
    if is_bad and values.size:
        values.flat[random.integers(values.size)] = random.choice(NOT_FINITE)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(getattr(ml_dtypes, dtype, dtype))
    wide = values.astype("float64" if dtype == "float64" else "float32")
    return Gradient(*_make(wide, dtype, layout, rows, shape), shape, wide, rows)


def _make(*arguments):
    """Returns a tensor, and the list of those that it is made of."""
    return globals()[f"_{BACKEND}"](*arguments)


def _torch(values, dtype, layout, rows, shape):
    import torch

    values = torch.tensor(values).to(getattr(torch, dtype))
    if layout == "transposed":
        backwards = tuple(reversed(range(values.ndim)))
        values = values.permute(backwards).contiguous().permute(backwards)
    elif layout == "strided":
        memory = torch.zeros((*values.shape, 3), dtype=values.dtype)
        memory[..., 1] = values
        return memory[..., 1], [memory]
    elif layout == "expanded":
        return values.expand(shape), [values]
    elif layout == "negative":
        memory = -values
        return torch._neg_view(memory), [memory]
    elif rows is not None:
        rows = torch.from_numpy(rows)[None]
        sparse = torch.sparse_coo_tensor(rows, values, shape)
        return sparse.coalesce() if layout == "sparse" else sparse, [values, rows]
    return values, [values]


def _tensorflow(values, dtype, layout, rows, shape):
    import tensorflow as tf

    values = tf.cast(tf.constant(values), dtype)
    if rows is None:
        return values, [values]
    rows = tf.constant(rows)
    return tf.IndexedSlices(values, rows, tf.constant(shape)), [values, rows]


def _jax(values, dtype, layout, rows, shape):
    import jax.numpy as jnp
    from jax.experimental import sparse

    values = jnp.asarray(values, dtype)
    if rows is None:
        return values, [values]
    rows = jnp.asarray(rows[:, None], "int32")
    once = {"unique_indices": True}
    return sparse.BCOO((values, rows), shape=shape, **once), [values, rows]
