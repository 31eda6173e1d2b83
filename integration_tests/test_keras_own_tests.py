"""Keras's own tests of its `LossScaleOptimizer`, with ours in its place.

They ship in the keras wheel. All of them pass, so the list of what differs on
purpose is empty where they look. `dynamic=False` without a scale is refused by
both; with one it is a fixed scale here and an error there, which they do not test.
"""

import keras
import pytest

import keras_lso

keras_tests = pytest.importorskip(
    "keras.src.optimizers.loss_scale_optimizer_test",
    reason="older keras wheels do not ship the tests",
)


class TestWithOurs(keras_tests.LossScaleOptimizerTest):
    @pytest.fixture(autouse=True)
    def _ours_in_place_of_keras_own(self, monkeypatch):
        monkeypatch.setattr(
            keras_tests, "LossScaleOptimizer", keras_lso.LossScaleOptimizer
        )

    def _skip_test_for_stateless(self, stateless):
        # Keras skips eager `apply` on JAX as well, which ours can do.
        if stateless and keras.backend.backend() == "tensorflow":
            self.skipTest("Keras has no `stateless_apply` on TensorFlow.")
