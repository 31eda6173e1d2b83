"""Weights of 16 bits on TensorFlow: replicas, checkpoints, and what is traced again."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_lso
from integration_tests.distributed import launch
from testing.beside_keras import bits

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

SHAPES = [(3, 5), (3, 5), (7,)]
KINDS = ["float32", "remainder", "stochastic"]
of_each_kind = pytest.mark.parametrize("kind", KINDS[1:])


# --- Two replicas -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    [printed] = launch.run("worker_tensorflow_masters", [])
    return launch.lines_of(printed, "TRAINED")


def arrays(found):
    return [np.float32(number) for number in found["numbers"]]


def test_replicas_stay_equal_with_each_kind_of_masters(trained):
    assert trained
    for case, found in trained:
        assert all(found[kind]["are alike"] for kind in KINDS), case
        assert all(found[kind]["skipped"] == 2 for kind in KINDS), case


def test_remainders_match_float32_masters_on_replicas(trained):
    for (name, dtype, is_sparse), found in trained:
        kept = "float32" if name in ("Adadelta", "LARC") else "int16"
        assert found["remainder"]["kept"] == [kept] * 3, name
        pairs = zip(arrays(found["remainder"]), arrays(found["float32"]), strict=True)
        for ours, right in pairs:
            is_normal = (np.abs(right) >= 2.0**-14) | (dtype == "bfloat16")
            np.testing.assert_array_equal(
                ours[is_normal], right[is_normal], err_msg=f"{name}, {is_sparse}"
            )


def test_stochastic_weights_stay_near_float32_masters_on_replicas(trained):
    for case, found in trained:
        pairs = zip(arrays(found["stochastic"]), arrays(found["float32"]), strict=True)
        for ours, right in pairs:
            # Seven roundings, of which few go the same way.
            np.testing.assert_allclose(
                ours, right, rtol=0, atol=7 * 2.0**-8, err_msg=case[0]
            )


# --- One device ---------------------------------------------------------------------


class Run:
    """Steps in a `tf.function`, of which every run has the same gradients."""

    def __init__(self, kind, seed=0, is_compiled=False):
        random = np.random.default_rng(seed)
        self.random, self._is_compiled = np.random.default_rng(1), is_compiled
        self.weights = [
            keras.Variable(random.normal(size=s).astype("float32"), dtype="bfloat16")
            for s in SHAPES
        ]
        self.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=4.0, master_weights=kind
        )
        self.optimizer.build(self.weights)
        self.trace()

    def trace(self):
        def step(grads):
            self.optimizer.apply(grads, self.weights, scaled=True)

        compiled = {"autograph": False, "jit_compile": self._is_compiled}
        self._step = tf.function(step, **compiled)

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

    def numbers(self):
        store = {}
        self.optimizer.save_own_variables(store)
        return [store[str(i)] for i in range(len(store))][-len(SHAPES) :]


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


def test_each_number_in_graph_has_its_own_container():
    """Numbers of a loaded function share a name, and would share a resource."""
    run = Run("remainder")
    grads = [tf.constant(1.0, shape=s) for s in SHAPES]

    @functools.partial(tf.function, autograph=False)
    def step():
        run.optimizer.apply(grads, run.weights, scaled=True)

    step()
    graph = step.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    containers = [n.attr["container"].s for n in nodes if n.op == "VarHandleOp"]
    assert len(containers) >= len(SHAPES)
    assert len(set(containers)) == len(containers)


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.full)]
)
def test_retraced_step_with_constraint_matches_float32_masters(is_compiled):
    """Stand-ins then take memory in the trace, of which a compiled step has none."""
    runs = [Run(kind, is_compiled=is_compiled) for kind in ("remainder", "float32")]
    for run in runs:
        run.steps(2)
        for variable in run.optimizer._masters.trained:
            variable.constraint = keras.constraints.MaxNorm(1.0)
        run.trace()
        run.steps(2)
    for ours, right in zip(*(run.numbers() for run in runs), strict=True):
        np.testing.assert_array_equal(ours, right)
    for stand_in in runs[0].optimizer._masters.numbers:
        held = tf.convert_to_tensor(stand_in.value)
        assert held.shape == stand_in.shape
