"""Keras's own tests of sparse gradients, with our class in place of Keras's.

Keras's class is one of their cases, beside optimizers that wrap nothing.
"""

import pytest
from keras.src import backend

import keras_lso

if not backend.SUPPORTS_SPARSE_TENSORS:
    pytest.skip("Keras has no sparse gradients on PyTorch", allow_module_level=True)

tests = pytest.importorskip(
    "keras.src.optimizers.optimizer_sparse_test",
    reason="older keras wheels do not ship the tests",
)


class TestSparseGradients(tests.OptimizerSparseTest):
    @pytest.fixture(autouse=True)
    def ours_in_place_of_keras_own(self, monkeypatch):
        monkeypatch.setattr(
            tests.optimizers, "LossScaleOptimizer", keras_lso.LossScaleOptimizer
        )


# The others wrap nothing, and have nothing of ours in them.
for name, test in list(vars(tests.OptimizerSparseTest).items()):
    if name.startswith("test_") and "loss_scale_optimizer" not in name:
        setattr(TestSparseGradients, name, pytest.mark.full(test))
