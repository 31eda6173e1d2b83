"""What weights and slots of 16 bits cost: the time of a step, and bytes a weight."""

import dataclasses
import math

import keras
import numpy as np

import keras_lso
from benchmarks.data import make_data
from benchmarks.inner import INNER
from benchmarks.shapes import SHAPES, parameters
from benchmarks.timing import summarize, time_in_turn

# Name: role, the values of `master_weights` and `slot_dtype`.
ROWS = {
    "without masters": ("bare", False, None),
    "float32 masters": ("masters", True, None),
    "masters, bfloat16 slots": ("slots", True, "bfloat16"),
    "remainders": ("remainder", "remainder", None),
    "8-bit remainders": ("remainder8", "remainder8", None),
    "stochastic rounding": ("stochastic", "stochastic", None),
    "stochastic, bfloat16 slots": ("all", "stochastic", "bfloat16"),
    "stochastic, int8 slots": ("all8", "stochastic", "int8"),
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
    for (name, (role, kind, slots)), compiled in _ways(rows):
        variables = tensors.variables()
        optimizer = keras_lso.LossScaleOptimizer(
            INNER[inner].make(), master_weights=kind, slot_dtype=slots
        )
        step = rows.keras_step(mode, optimizer, variables, tensors, True)
        held = sum(_bytes_of(v) for v in [*variables, *optimizer.variables])
        if hasattr(rows, "compiled"):
            step = dataclasses.replace(step, run=rows.compiled(step.run, compiled))
        if compiled:
            name, role = f"{name}, compiled", f"{role}, compiled"
        steps[name] = step
        row = {"name": name, "role": role, "bytes_a_weight": held / count}
        results.append({**row, "first_s": rows.first_seconds(step)})
    clocks = {name: _clock(rows, step) for name, step in steps.items()}
    seconds = time_in_turn(clocks, rounds)
    for row in results:
        row |= summarize(seconds[row["name"]])
        row["extra_bytes"] = rows.extra_bytes(steps[row["name"]])
    told = {"mode": mode, "dtype": dtype, "inner": inner, "shapes": shapes}
    return {**told, "parameters": count, "rows": results}


def _ways(rows):
    """Returns pairs of an item of `ROWS`, and whether its step is compiled."""
    eager = [(row, False) for row in ROWS.items()]
    if not hasattr(rows, "compiled"):
        return eager
    return eager + [(row, True) for row in ROWS.items() if row[1][1]]


def _clock(rows, step):
    return lambda: rows.seconds(step)


def _bytes_of(variable):
    """Returns the bytes that a variable holds."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    width = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return width * math.prod(variable.shape)
