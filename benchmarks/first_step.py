"""Is a step compiled once, whatever happens to the scale and the rate?

The seconds of first steps are measured with the rows themselves.
"""

import keras
import numpy as np
from keras import ops

import keras_lso
from benchmarks.data import make_data
from benchmarks.inner import INNER, SCALE


def count(rows, mode, inner):
    """Counts how often our step is traced or compiled while its state changes.

    In turn: two finite steps, one that overflows, which halves the scale, and a
    finite one; then all that again at another learning rate.

    Args:
        rows: Module `rows_<backend>`.
        mode: String. One of its modes.
        inner: String. The name of the inner optimizer.

    Returns:
        A dict. `compilations` is None where nothing is compiled; on TensorFlow it is
        the number of traces.
    """
    data = make_data("tiny", "float32")
    optimizer = keras_lso.LossScaleOptimizer(INNER[inner].make(), initial_scale=SCALE)
    variables = [keras.Variable(np.array(w)) for w in data.weights]
    step, compilations = rows.counted_step(mode, optimizer, variables)
    finite = [ops.convert_to_tensor(g * np.float32(SCALE)) for g in data.gradients]
    overflow = [*finite[:-1], finite[-1] * np.float32("inf")]
    for rate in (0.5, 0.25):
        optimizer.learning_rate = rate
        for gradients in (finite, finite, overflow, finite):
            step(gradients)
    halvings = float(ops.convert_to_numpy(optimizer.loss_scale)) / SCALE
    if halvings != 0.25:
        raise RuntimeError(f"{inner}: two overflows made the scale {halvings} of it.")
    return {
        "mode": mode,
        "inner": inner,
        "compilations": compilations() if compilations else None,
    }
