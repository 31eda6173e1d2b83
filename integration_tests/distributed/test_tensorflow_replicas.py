"""An overflow on one replica only is an overflow: all of them skip."""

import functools

import keras
import pytest

from integration_tests.distributed import launch
from testing.tiers import is_full

# What worker_mirrored_tf_keras.py knows; a MultiOptimizer came with Keras 3.15.
BARE = 7
OPTIMIZERS = 7 + hasattr(keras.optimizers, "MultiOptimizer")


def ways():
    """Returns of how many ways to do the same each optimizer takes part in."""
    return 2 if is_full() else 1


def run_worker(name):
    """Returns `printed(word)`: what the worker prints in lines that start with it."""
    [printed] = launch.run(name, [])
    return functools.partial(launch.lines_of, printed)


@pytest.fixture(scope="module")
def printed():
    return run_worker("worker_mirrored")


@pytest.fixture(scope="module")
def printed_by_tf_keras_methods():
    return run_worker("worker_mirrored_tf_keras")


def test_overflow_on_any_replica_skips_step_on_all(printed):
    first, second, applied, last = printed("STATE")
    untouched = [[1.0, -0.0]] * 2
    # Both replicas' gradients of 2 add up to 4; unscaled by 2 that is 2, and the
    # step 0.5 * 2 = 1.
    moved = [[0.0, -2.0]] * 2
    assert first == {"weights": untouched, "scale": 4.0, "skipped": 1, "applied": 0}
    assert second == {"weights": untouched, "scale": 2.0, "skipped": 2, "applied": 0}
    assert applied == {"weights": moved, "scale": 2.0, "skipped": 2, "applied": 1}
    assert last == {"weights": moved, "scale": 1.0, "skipped": 3, "applied": 1}


def test_keras_wrapper_applies_overflow_of_second_replica(printed):
    """As README.md and docs/scaling.md say: it checks the first replica alone."""
    [[on_first, on_second]] = printed("KERAS")
    assert on_first == ["1.0", "1.0"]
    assert on_second == ["-inf", "-inf"]


def test_nan_on_any_replica_skips_step_of_guarded_optimizer_on_all(printed):
    first, applied, last = printed("GUARDED")
    # The gradients of 1 add up to 2; the step is 0.5 * 2 = 1.
    moved = [[0.0, -2.0]] * 2
    assert first == {"weights": [[1.0, -0.0]] * 2, "skipped": 1, "applied": 0}
    assert applied == {"weights": moved, "skipped": 1, "applied": 1}
    assert last == {"weights": moved, "skipped": 2, "applied": 1}


def test_log_max_scale_uses_largest_magnitude_of_summed_gradients(printed):
    # 2 + 62: 2**(16 - 6)
    assert printed("AMAX") == [2.0**10]


def test_norms_are_of_gradients_summed_over_replicas(printed):
    assert_stepped_as_one(printed("NORMS"), count=10)


def test_micro_batches_are_accumulated_on_all_replicas(printed):
    assert_stepped_as_one(printed("ACCUMULATED"), count=3)


def assert_stepped_as_one(differences, count):
    """All replicas are where one is that steps on the sums of the gradients."""
    assert len(differences) == count
    for name, moved, difference in differences:
        assert moved > 0.1, name
        # Two steps at most, on weights below 8, each a few float32 roundings.
        assert difference < 8 * 1e-6, name


def test_variables_created_outside_strategy_scope_are_rejected(printed):
    results = printed("OUTSIDE")
    names = [name for name, *_ in results]
    assert names == ["weight", "TensorFlow's weight", "optimizer"]
    for name, error, is_unchanged in results:
        assert "was not made in the strategy's scope" in error, name
        assert ("mine" in error) == ("weight" in name), name
        assert is_unchanged, name


def test_reduced_gradients_are_not_summed_over_replicas_again(
    printed_by_tf_keras_methods,
):
    results = printed_by_tf_keras_methods("REDUCED")
    assert len(results) == OPTIMIZERS * ways() + 2
    for name, expected, replicas in results:
        assert len(replicas) == 2
        assert replicas[0] == replicas[1], name
        # Three steps on weights below 8, each a few float32 roundings.
        assert replicas[0] == pytest.approx(expected, abs=8 * 1e-6), name
        assert max(abs(replicas[0][0] - 4.0), abs(replicas[0][1] - 3.0)) > 0.1


def test_tensorflow_variables_train_on_all_replicas(printed_by_tf_keras_methods):
    results = printed_by_tf_keras_methods("BARE")
    assert len(results) == BARE * ways()
    for name, how, expected, replicas, was_skipped in results:
        assert replicas[0] == replicas[1], (name, how)
        # Two steps on weights below 8, each a few float32 roundings; of float16 one.
        limit = 8 * (2.0**-10 if "float16" in name else 1e-6)
        assert replicas[0] == pytest.approx(expected, abs=limit), (name, how)
        assert max(abs(replicas[0][0] - 4.0), abs(replicas[0][1] - 3.0)) > 0.01
        assert was_skipped, (name, how)


def test_cross_replica_context_raises_and_applies_nothing(printed_by_tf_keras_methods):
    results = printed_by_tf_keras_methods("CROSS")
    assert len(results) == (OPTIMIZERS - 1) * 3 + 2
    for name, error, is_unchanged in results:
        assert "cannot be called in cross-replica context" in error, name
        assert is_unchanged, name
