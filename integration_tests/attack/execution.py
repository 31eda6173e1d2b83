"""Tensors and arrays, and the ways in which a step is executed."""

import keras
import numpy as np
from keras import ops

from testing.compiling import jax_jit

BACKEND = keras.backend.backend()


def tensor(values, dtype):
    # A copy: changes of the tensor must not reach the array.
    with np.errstate(over="ignore"):
        values = np.array(
            values, dtype if dtype in ("float16", "float64") else "float32"
        )
    return ops.cast(ops.convert_to_tensor(values), dtype)


def tensors(arrays):
    return [None if a is None else tensor(a, a.dtype.name) for a in arrays]


def array(value):
    """A copy, in float32 or in float64; on PyTorch the tensor would share it."""
    value = ops.convert_to_tensor(value)
    dtype = keras.backend.standardize_dtype(value.dtype)
    if dtype in ("float16", "bfloat16"):
        value = ops.cast(value, "float32")
    return np.array(ops.convert_to_numpy(value))


def bits(values):
    # A widened number has the bits of what it was.
    return [None if v is None else _one_nan(array(v)).tobytes() for v in values]


def _one_nan(values):
    """Returns an array in which all NaN are alike: a copy in bfloat16 has others."""
    return np.where(np.isnan(values), np.nan, values).astype(values.dtype)


def compiled(function, variables, execution):
    """Returns the function, compiled; `variables` are all that it reads and writes."""
    if execution == "eager":
        return function
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=execution == "xla")
    # JAX may write the new values over the old ones.
    options = {"donate_argnums": 0} if execution == "donated" else {}
    return jax_jit(function, variables, **options)


def stateless_apply(optimizer, variables, gradients, **options):
    """Does what `optimizer.apply` does, by its `stateless_apply`."""
    own = optimizer.variables
    weights, state = optimizer.stateless_apply(
        [v.value for v in own], gradients, [v.value for v in variables], **options
    )
    for v, new in zip([*variables, *own], [*weights, *state], strict=True):
        v.assign(new)
