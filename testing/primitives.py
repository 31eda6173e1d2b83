"""The primitives of the backend seam, in each variant that a backend has.

The variants are the current framework's, the reference in `Framework`, and the
framework's on a device whose tensors the host must not read.
"""

import types
from unittest import mock

import keras
import numpy as np
import pytest

from keras_lso._backend import backend
from keras_lso._backend.framework import Framework, MeasureOptions
from keras_lso._backend.rule import TrustRatio
from keras_lso._keras_internals.variables import storage_of

DTYPES = ["float16", "bfloat16", "float32"]
if keras.backend.backend() != "jax":
    # A skipped combination with float64 would represent its other values.
    DTYPES.append("float64")
NOT_FINITE = [np.inf, -np.inf, np.nan]


# The function that tells a step that it runs on a CPU, where reading a tensor is free.
TELLS_OF_CPU = {
    "torch": "keras_lso._backend.torch.measure.is_on_host",
    "jax": "keras_lso._backend.jax.measure._is_on_cpu",
}.get(keras.backend.backend())


def on_an_accelerator(function):
    """A primitive on a device whose tensors the host must not read."""

    def call(*args, **kwargs):
        with mock.patch(TELLS_OF_CPU, lambda *args: False):
            return function(*args, **kwargs)

    return call


IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
PRIMITIVES = ["measure", "run_if", "update", "l2_norms"]
# The primitives that read tensors on a CPU.
LOOK_AT_TENSORS = {"torch": ["measure", "run_if", "update"], "jax": ["measure"]}.get(
    keras.backend.backend(), []
)
REFERENCE = Framework()
KERNELS = {
    "framework": backend,
    "reference": REFERENCE,
    "accelerator": types.SimpleNamespace(
        **{name: getattr(backend, name) for name in PRIMITIVES}
        | {name: on_an_accelerator(getattr(backend, name)) for name in LOOK_AT_TENSORS}
    ),
}


def is_reference(primitive):
    """Whether a function is the plain `Framework`'s, which a backend may inherit."""
    function = getattr(primitive, "__func__", primitive)
    return function is getattr(Framework, function.__name__, None)


def with_keywords(measure):
    """A `measure` whose options are keywords."""
    return lambda grads, **options: measure(grads, MeasureOptions(**options))


def implementations(*primitives):
    """The functions of each of `KERNELS`: `{name: function}`, or tuples of several.

    Equal functions, such as `update` on JAX, are listed once. The reference is not
    called on TensorFlow, where it takes long; on JAX it is the same.
    """
    found, seen = {}, []
    for name, kernels in KERNELS.items():
        if name == "reference" and "update" in primitives and IS_TENSORFLOW:
            continue
        methods = tuple(getattr(kernels, primitive) for primitive in primitives)
        functions = [getattr(method, "__func__", method) for method in methods]
        if functions not in seen:
            seen.append(functions)
            found[name] = tuple(
                with_keywords(method) if primitive == "measure" else method
                for primitive, method in zip(primitives, methods, strict=True)
            )
    return found if primitives[1:] else {name: f for name, [f] in found.items()}


def in_each_way(argument, ways):
    return pytest.mark.parametrize(argument, ways.values(), ids=ways)


MODEL_GARDEN, PAPER = (
    TrustRatio(eeta=0.1),
    TrustRatio(eeta=0.1, epsilon=1e-3, upper=1.0, paper=True),
)


def storage(update, variables):
    """The storage that `update` changes. The reference always takes variables."""
    if is_reference(update):
        return variables
    return storage_of(variables)
