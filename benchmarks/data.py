"""The values of weights and gradients, as NumPy arrays.

Chosen so that hundreds of steps on the same gradients meet no denormal number and no
overflow, in float32 or float16: arithmetic on denormals is many times slower, and a
step that overflows is skipped, which would be timed as if it had been made. So every
gradient is between 0.5 and 1 in magnitude: at a scale of 2**15 that is within
float16, and its square times Adam's `1 - beta_2`, 0.00025, is not a denormal there.
"""

import functools
from dataclasses import dataclass

import numpy as np

from benchmarks.shapes import SHAPES

KINDS = {
    "float32": "gradients and variables in float32",
    "float16": "gradients and variables in float16, masters in float32",
}


@dataclass(frozen=True)
class Data:
    """The tensors of a model.

    Attributes:
        kind: String. One of `KINDS`; also the dtype of variables and gradients.
        weights: List of float32 arrays.
        gradients: List of float32 arrays, not scaled.
    """

    kind: str
    weights: list
    gradients: list


def make_data(shapes, kind):
    """Returns the `Data` for the name of some shapes."""
    return Data(kind, *_arrays(shapes))


@functools.lru_cache(maxsize=1)
def _arrays(shapes):
    random = np.random.default_rng(0)
    weights, gradients = [], []
    for shape in SHAPES[shapes]():
        weights.append(random.standard_normal(shape, "float32") * np.float32(0.05))
        gradient = random.random(shape, "float32") - np.float32(0.5)
        gradients.append(gradient + np.copysign(np.float32(0.5), gradient))
    return weights, gradients


def check_healthy(name, step, data):
    """Raises RuntimeError if a row's steps were not what they are timed for.

    Looks at up to a million elements of each tensor.
    """
    weights, slots = step.state()
    for tensor in [*weights, *slots]:
        array = np.asarray(tensor)
        if not np.issubdtype(array.dtype, np.floating):
            continue
        values = np.abs(_some(array))
        if not np.isfinite(values).all():
            raise RuntimeError(f"{name}: a weight or slot is not finite any more.")
        denormal = (values > 0) & (values < np.finfo(array.dtype).tiny)
        # Of weights of this size one in a thousand is, in float16.
        if denormal.mean() > 1e-2 and denormal.sum() > 1:
            raise RuntimeError(f"{name}: {denormal.mean():.1%} of a slot are denormal.")
    first = np.asarray(weights[0])
    if np.array_equal(first, data.weights[0].astype(first.dtype)):
        raise RuntimeError(f"{name}: its steps did not change the weights.")


def check_alike(name, steps, tolerance):
    """Raises RuntimeError if rows that had the same to do have different weights.

    Args:
        name: String. What these rows have in common.
        steps: Dict of the rows' names to their steps.
        tolerance: Float. What may lie between two weights, in units of the largest
            of their tensor.
    """
    names = list(steps)
    first, *others = ([np.asarray(w) for w in s.state()[0]] for s in steps.values())
    for other, weights in zip(names[1:], others, strict=True):
        for a, b in zip(first, weights, strict=True):
            a, b = a.astype("float32"), b.astype("float32")
            difference = np.abs(a - b).max() / np.abs(a).max()
            if not difference <= tolerance:
                raise RuntimeError(
                    f"{name}: the weights of {names[0]} and {other} differ by "
                    f"{difference:.2g} of the largest."
                )


def _some(array, limit=2**20):
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // limit)]
