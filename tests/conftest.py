"""Shared fixtures: the ways to run a step, and exact comparisons."""

import keras
import pytest

from testing import compiling, harness, kernels, tensors, tiers


def _eager(function, variables):
    return function


def _tf_function(jit_compile):
    def compile_(function, variables):
        import tensorflow as tf

        # AutoGraph takes as long as the tracing itself. In `make test` it
        # reads a step in `_backend/test_many_tensors.py`, and in `integration_tests/`.
        autograph = tiers.is_full() and not jit_compile
        return tf.function(function, jit_compile=jit_compile, autograph=autograph)

    return compile_


_COMPILERS = {
    "tensorflow": {
        "eager": _eager,
        "graph": _tf_function(jit_compile=False),
        "xla": _tf_function(jit_compile=True),
    },
    "jax": {"eager": _eager, "jit": compiling.jax_jit},
    "torch": {"eager": _eager},
}[keras.backend.backend()]


@pytest.fixture(params=_COMPILERS)
def compiled(request):
    """`compiled(function, variables)`, in each way that the backend has.

    `variables` are all that the function may read and write.
    """
    return _COMPILERS[request.param]


@pytest.fixture
def compiled_once():
    """The one of `compiled` that is fastest for many steps."""
    fastest = {"tensorflow": "graph", "jax": "jit", "torch": "eager"}
    return _COMPILERS[fastest[keras.backend.backend()]]


@pytest.fixture
def compiled_on_jax():
    """The one of `compiled` that is fastest for a few steps with branches.

    Eager JAX compiles each `cond` at each step, TensorFlow and PyTorch nothing.
    """
    return _COMPILERS["jit" if keras.backend.backend() == "jax" else "eager"]


@pytest.fixture(params=harness.WAYS)
def way(request, monkeypatch):
    """On PyTorch once on the host, and once as on an accelerator."""
    harness.take(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=[*harness.WAYS, "generic"])
def each_way(request, monkeypatch):
    """As `way`, and once without kernels."""
    if request.param == "generic":
        with kernels.off():
            yield
        return
    harness.take(request.param, monkeypatch)
    yield


@pytest.fixture
def snapshot():
    """`snapshot(variables)`: their bits, in which -0.0 is not 0.0."""
    return harness.bits


@pytest.fixture
def sparse_gradient():
    """`sparse_gradient(values, rows, shape)`: a gradient of some rows only."""
    return tensors.sparse_gradient
