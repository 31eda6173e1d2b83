"""The primitives of the backend seam, in each of the ways that a backend has of them.

Those of the framework that runs, the reference in `Framework`, and the framework's as
they run where nobody may look at a tensor.
"""

import types
from unittest import mock

import keras
import numpy as np
import pytest

from keras_lso._backend import backend
from keras_lso._backend.framework import Framework
from keras_lso._backend.rule import TrustRatio
from keras_lso._keras_internals.variables import storage_of

DTYPES = ["float16", "bfloat16", "float32"]
if keras.backend.backend() != "jax":
    # A combination with one that is skipped would stand for its other values.
    DTYPES.append("float64")
NOT_FINITE = [np.inf, -np.inf, np.nan]


# What tells a step that it runs on a CPU, where to look at a tensor costs nothing.
TELLS_OF_CPU = {
    "torch": "keras_lso._backend.torch.measure.is_on_host",
    "jax": "keras_lso._backend.jax.measure._is_on_cpu",
}.get(keras.backend.backend())


def on_an_accelerator(function):
    """A primitive as it runs where nobody may look at a tensor."""

    def call(*args, **kwargs):
        with mock.patch(TELLS_OF_CPU, lambda *args: False):
            return function(*args, **kwargs)

    return call


IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
PRIMITIVES = ["measure", "run_if", "fused_step", "l2_norms"]
# Of these, what looks at tensors on a CPU.
LOOK_AT_TENSORS = {
    "torch": ["measure", "run_if", "fused_step"],
    "jax": ["measure"],
}.get(keras.backend.backend(), [])
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
    """Whether it is the plain `Framework`'s, which a backend may have inherited."""
    function = getattr(primitive, "__func__", primitive)
    return function is getattr(Framework, function.__name__, None)


def implementations(*primitives):
    """The functions of each of `KERNELS`: `{name: function}`, or tuples of several.

    Of those that are the same here, as `fused_step` is on JAX, one is enough. The
    reference's is not called on TensorFlow, where it takes long; JAX's is the same.
    """
    found, seen = {}, []
    for name, kernels in KERNELS.items():
        if name == "reference" and "fused_step" in primitives and IS_TENSORFLOW:
            continue
        methods = tuple(getattr(kernels, primitive) for primitive in primitives)
        functions = [getattr(method, "__func__", method) for method in methods]
        if functions not in seen:
            seen.append(functions)
            found[name] = methods
    return found if primitives[1:] else {name: f for name, [f] in found.items()}


def in_each_way(argument, ways):
    return pytest.mark.parametrize(argument, ways.values(), ids=ways)


MODEL_GARDEN, PAPER = (
    TrustRatio(eeta=0.1),
    TrustRatio(eeta=0.1, epsilon=1e-3, upper=1.0, paper=True),
)


def storage(fused_step, variables):
    """What `fused_step` changes. The reference takes variables on all backends."""
    if is_reference(fused_step):
        return variables
    return storage_of(variables)
