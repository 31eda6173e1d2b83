"""What weights and slots of 16 bits cost: the time of a step, and bytes a weight."""

import math

import keras
import numpy as np

import keras_lso
from benchmarks.data import make_data
from benchmarks.inner import INNER
from benchmarks.shapes import SHAPES, parameters
from benchmarks.timing import summarize, time_in_turn

DTYPES = ("bfloat16", "float16")
INNER_OPTIMIZERS = ("SGD+momentum", "Adam", "AdamW", "LARS")
# Name: role, the values of `master_weights` and `slot_dtype`.
ROWS = {
    "without masters": ("bare", False, None),
    "float32 masters": ("masters", True, None),
    "float32 masters, bfloat16 slots": ("slots", True, "bfloat16"),
    "remainders": ("remainder", "remainder", None),
    "stochastic rounding": ("stochastic", "stochastic", None),
    "stochastic rounding, bfloat16 slots": ("all", "stochastic", "bfloat16"),
}


def measure(rows, mode, dtype, inner, rounds, shapes="resnet50"):
    """Returns the time of a step, and the bytes of each weight, for each of `ROWS`.

    Args:
        rows: Module, `rows_torch` or one like it.
        mode: String.
        dtype: String, of weights and gradients.
        inner: String. One of `INNER`.
        rounds: Int.
        shapes: String. One of `SHAPES`. Defaults to `"resnet50"`.
    """
    tensors = rows.Tensors(make_data(shapes, dtype))
    count, results, steps = parameters(SHAPES[shapes]()), [], {}
    for name, (role, kind, slots) in ROWS.items():
        variables = tensors.variables()
        optimizer = keras_lso.LossScaleOptimizer(
            INNER[inner].make(), master_weights=kind, slot_dtype=slots
        )
        step = rows.keras_step(mode, optimizer, variables, tensors, True)
        held = sum(_bytes_of(v) for v in [*variables, *optimizer.variables])
        steps[name] = step
        rows.first_seconds(step)
        results.append({"name": name, "role": role, "bytes_a_weight": held / count})
    clocks = {name: _clock(rows, step) for name, step in steps.items()}
    seconds = time_in_turn(clocks, rounds)
    for row in results:
        row |= summarize(seconds[row["name"]])
        row["extra_bytes"] = rows.extra_bytes(steps[row["name"]])
    told = {"mode": mode, "dtype": dtype, "inner": inner, "shapes": shapes}
    return {**told, "parameters": count, "rows": results}


def _clock(rows, step):
    return lambda: rows.seconds(step)


def _bytes_of(variable):
    """Returns the bytes that a variable holds."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    width = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return width * math.prod(variable.shape)
