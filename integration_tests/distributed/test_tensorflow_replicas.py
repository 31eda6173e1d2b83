"""Steps on two replicas of TensorFlow: as one step on the sum of their gradients.

Loops in which one of them overflows are in `test_tensorflow_loop.py`.
"""

import functools

import pytest

from integration_tests.distributed import launch


@pytest.fixture(scope="module")
def printed():
    """`printed(word)`: what the worker prints in lines that start with it."""
    [printed] = launch.run("worker_tensorflow_replicas", [])
    return functools.partial(launch.lines_of, printed)


def test_nan_on_any_replica_skips_step_of_guarded_optimizer_on_all(printed):
    # The gradients of 1 add up to 2; the step is 0.5 * 2 = 1.
    start, moved = [[1.0, -0.0]] * 2, [[0.0, -2.0]] * 2
    assert printed("GUARDED") == [[start, 1, 0], [moved, 1, 1], [moved, 2, 1]]


def test_log_max_scale_uses_largest_magnitude_of_summed_gradients(printed):
    # 2 + 62: 2**(16 - 6)
    assert printed("AMAX") == [2.0**10]


def test_replicas_step_like_one_on_sum_of_gradients(printed):
    results = printed("SUM")
    assert len(results) == 3 + 6 + 1 + 4 * 3 + 4 + 2
    for name, moved, difference in results:
        assert moved > 0.1, name
        # Two steps on weights below 8, each a few float32 roundings.
        assert difference < 8 * 1e-6, name


def test_cross_replica_context_raises_and_applies_nothing(printed):
    results = printed("CROSS")
    assert len(results) == 4 * 2
    for name, error, is_unchanged in results:
        assert "cannot be called in cross-replica context" in error, name
        assert is_unchanged, name


def test_variables_created_outside_strategy_scope_are_rejected(printed):
    results = printed("OUTSIDE")
    assert [name for name, *_ in results] == [
        *("weight", "TensorFlow's weight", "optimizer")
    ]
    for name, error, is_unchanged in results:
        assert "was not made in the strategy's scope" in error, name
        assert ("mine" in error) == ("weight" in name), name
        assert is_unchanged, name


def test_accumulation_without_rule_is_rejected_in_function(printed):
    [(error, is_unchanged)] = printed("ACCUMULATES")
    assert "choose an optimizer with a fast path" in error
    assert is_unchanged


def test_dynamic_update_of_tf_keras_passes_in_function(printed):
    # A slot that is made in the first step starts at 0. The gradient adds up to 2.
    stepped = [[-1.0, 0.0]] * 2
    assert printed("DYNAMIC") == [[[stepped, 4.0], [stepped, 2.0]]] * 6
