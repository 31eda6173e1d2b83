"""Weights of 16 bits in TensorFlow's checkpoints and saved models."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_lso
from testing.harness import bits

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

SHAPES = [(3, 5), (3, 5), (7,)]
of_each_kind = pytest.mark.parametrize(
    "kind", ["remainder", "remainder8", "stochastic"]
)


class Run:
    """Steps in a `tf.function`, whose gradients are the same in every run."""

    def __init__(self, kind, seed=0):
        random, self.random = np.random.default_rng(seed), np.random.default_rng(1)
        self.weights = [
            keras.Variable(random.normal(size=s).astype("float32"), dtype="bfloat16")
            for s in SHAPES
        ]
        self.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=4.0, master_weights=kind
        )
        self.optimizer.build(self.weights)

        def step(grads):
            self.optimizer.apply(grads, self.weights, scaled=True)

        self._step = tf.function(step, autograph=False)

    def steps(self, count):
        for _ in range(count):
            normal = self.random.normal
            self._step([tf.constant(normal(size=s).astype("float32")) for s in SHAPES])
        return self

    def checkpoint(self):
        weights = [w.value for w in self.weights]
        return tf.train.Checkpoint(optimizer=self.optimizer, weights=weights)

    def state(self):
        # The row of skips is not saved.
        return bits([*self.weights, *self.optimizer.variables[:-1]])


@pytest.mark.parametrize("builds_first", [True, False])
@of_each_kind
def test_run_restored_from_checkpoint_matches_uninterrupted_run(
    kind, builds_first, tmp_path
):
    run = Run(kind).steps(2)
    path = run.checkpoint().save(tmp_path / "state")
    empty = [name for name, shape in tf.train.list_variables(path) if 0 in shape]
    assert not empty
    other = Run(kind, seed=5)
    if builds_first:
        other.steps(1)
    other.checkpoint().restore(path).assert_consumed()
    assert other.state() == run.state()
    other.random = np.random.default_rng(2)
    run.random = np.random.default_rng(2)
    assert other.steps(2).state() == run.steps(2).state()


@of_each_kind
def test_step_of_saved_model_matches_original_step(kind, tmp_path):
    run, module = Run(kind).steps(1), tf.Module()
    module.optimizer, module.weights = run.optimizer, [w.value for w in run.weights]
    grads = [tf.constant(1.0, shape=s) for s in SHAPES]

    @functools.partial(tf.function, autograph=False, input_signature=[])
    def step():
        run.optimizer.apply(grads, run.weights, scaled=True)

    module.step = step
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    for _ in range(3):
        loaded.step()
        step()
    for ours, right in zip(loaded.weights, module.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), right.numpy())
