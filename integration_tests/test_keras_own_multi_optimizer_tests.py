"""Keras's own tests of its `MultiOptimizer`, with our class in place of Keras's.

Ours wraps one of theirs, and is refused as a member of one. They ship in the keras
wheel since there is a `MultiOptimizer`.
"""

import pytest

import keras_lso

tests = pytest.importorskip(
    "keras.src.optimizers.multi_optimizer_test",
    reason="older keras wheels have no `MultiOptimizer`",
)


class TestMultiOptimizer(tests.MultiOptimizerTest):
    @pytest.fixture(autouse=True)
    def ours_in_place_of_keras_own(self, monkeypatch):
        monkeypatch.setattr(
            tests.optimizers, "LossScaleOptimizer", keras_lso.LossScaleOptimizer
        )
