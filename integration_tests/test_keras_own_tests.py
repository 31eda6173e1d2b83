"""Keras's own tests of its `LossScaleOptimizer`, with ours in its place.

They are in the keras wheel, and all of them pass: the tests of the class, of sparse
gradients, and of `MultiOptimizer`, which Keras has since 3.15.
"""

import importlib
import importlib.util

import keras
import pytest
from keras.src import backend

import keras_lso


def keras_tests(name):
    """Returns a module of Keras's tests and its class; None and `object` without it."""
    name = f"keras.src.optimizers.{name}_test"
    if importlib.util.find_spec(name) is None:
        return None, object
    module = importlib.import_module(name)
    [cls] = [c for n, c in vars(module).items() if n.endswith("Test")]
    return module, cls


def with_ours(module, *path):
    """Returns a fixture that replaces Keras's class by ours."""

    @pytest.fixture(autouse=True)
    def ours_in_place_of_keras_own(self, monkeypatch):
        owner = getattr(module, *path) if path else module
        ours = keras_lso.LossScaleOptimizer
        monkeypatch.setattr(owner, "LossScaleOptimizer", ours)

    return ours_in_place_of_keras_own


module, cls = keras_tests("loss_scale_optimizer")


class TestWithOurs(cls):
    ours = with_ours(module)

    def _skip_test_for_stateless(self, stateless):
        # Keras skips eager `apply` on JAX as well, which ours can do.
        if stateless and keras.backend.backend() == "tensorflow":
            self.skipTest("Keras has no `stateless_apply` on TensorFlow.")


module, cls = keras_tests("optimizer_sparse")


@pytest.mark.skipif(not backend.SUPPORTS_SPARSE_TENSORS, reason="none on PyTorch")
class TestSparseGradients(cls):
    ours = with_ours(module, "optimizers")


# The other tests use no class of ours.
for name, test in list(vars(cls).items()):
    if name.startswith("test_") and "loss_scale_optimizer" not in name:
        setattr(TestSparseGradients, name, pytest.mark.full(test))

module, cls = keras_tests("multi_optimizer")


class TestMultiOptimizer(cls):
    ours = with_ours(module, "optimizers")


# Or pytest would collect it.
del cls
