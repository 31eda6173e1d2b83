"""Two replicas that stall go back to the same copy, and go on alike."""

import pytest

from integration_tests.distributed import launch

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full


def test_restored_replicas_continue_like_run_restarted_by_hand():
    [printed] = launch.run("worker_tensorflow_restore", [])
    [[told]] = launch.lines_of(printed, "TOLD")
    assert "retry 1 of 3" in told
    [same] = launch.lines_of(printed, "SAME")
    assert len(same) > 10 and all(same)
    assert launch.lines_of(printed, "FINITE") == [True]
