"""Statistics of two replicas survive a step that overflows on one of them.

Each replica has statistics of its own: those of the one that did not overflow are
restored as well, since the step is skipped on both.
"""

import numpy as np
import pytest

from integration_tests.distributed import launch

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def printed():
    [printed] = launch.run("worker_tensorflow_statistics", [])
    return printed


@pytest.mark.parametrize("how", ["PROTECTED", "SYNCHRONIZED", "LOOP"])
def test_skipped_step_restores_statistics_of_all_replicas(printed, how):
    [protected] = launch.lines_of(printed, how)
    [unprotected] = launch.lines_of(printed, "UNPROTECTED")
    assert len(protected[0][0]) == 2
    for step in range(4):
        for before, after in zip(*protected[step : step + 2], strict=True):
            assert (before == after) is (step in (1, 2)), step
            assert np.isfinite(np.array(after)).all()
    # The mean and the variance of some replica after the first overflow.
    assert not np.isfinite(np.array(unprotected[2][:2])).all()
