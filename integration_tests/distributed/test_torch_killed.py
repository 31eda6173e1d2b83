"""A process dies in the middle, all start again, and nobody can tell afterwards."""

import signal
import subprocess

import numpy as np
import pytest

from integration_tests.distributed import launch, problem

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full


def start(folder, *arguments):
    # The file by which the processes of a run find each other.
    (folder / "rendezvous").unlink(missing_ok=True)
    return [
        launch.start(
            "worker_torch_killed",
            str(rank),
            str(folder),
            *arguments,
            OMP_NUM_THREADS="1",
        )
        for rank in range(2)
    ]


def wait_for_death(first, last):
    """Waits until the last process is dead and the first has noticed."""
    try:
        last.communicate(timeout=launch.TIMEOUT)
        # Gloo notices that the connection is closed.
        first.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        pass
    finally:
        first.kill()
        last.kill()
        first.communicate()
    assert last.returncode == -signal.SIGKILL
    assert first.returncode != 0


def test_run_with_killed_process_ends_like_undisturbed_run(tmp_path):
    wait_for_death(*start(tmp_path, "15"))
    # The third checkpoint was never finished.
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"rendezvous", "step_5", "step_10", "unfinished_15"}
    printed = launch.finish(start(tmp_path))
    assert [launch.lines_of(one, "FROM") for one in printed] == [[10], [10]]
    for rank in range(2):
        expected = problem.load(tmp_path / f"undisturbed_{rank}.npz")
        disturbed = problem.load(tmp_path / f"disturbed_{rank}.npz")
        problem.assert_bitwise_equal(disturbed, expected)
        # It has learned something, and has skipped something.
        assert not np.array_equal(expected[0][0], problem.initial_weights()[0])
        skipped, applied = expected[4].item(), expected[8].item()
        assert 10 < applied < skipped + applied == 20
