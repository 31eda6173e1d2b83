"""A process dies in the middle, all start again, and nobody can tell afterwards."""

import signal
import subprocess

import numpy as np

from integration_tests.distributed import launch, problem
from integration_tests.distributed.problem import load


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
        last.communicate(timeout=300)
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


def test_a_run_in_which_a_process_was_killed_ends_as_any_other(tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    both = start(undisturbed)
    wait_for_death(*start(disturbed, "15"))
    launch.finish(both)
    # The third checkpoint was never finished.
    written = {path.name for path in disturbed.iterdir()}
    assert written == {"rendezvous", "step_5", "step_10", "unfinished_15"}
    printed = launch.finish(start(disturbed))
    assert [launch.lines_of(one, "FROM") for one in printed] == [[10], [10]]
    for rank in range(2):
        expected = load(undisturbed / f"state_{rank}.npz")
        problem.assert_bitwise_equal(load(disturbed / f"state_{rank}.npz"), expected)
        # It has learned something, and has skipped something.
        weights = [w[0] for w in expected[:4]]
        assert not np.array_equal(weights[0], problem.initial_weights()[0])
        attempted, applied = expected[4].item(), expected[8].item()
        assert 10 < applied < attempted == 20
