"""Loops under `MirroredStrategy` and `MultiWorkerMirroredStrategy`, of two replicas.

After every step the replicas hold the same, bit for bit, and what a single process
holds that trains on their batches together.
"""

import numpy as np
import pytest

from integration_tests.distributed import launch, problem, tensorflow_loop
from integration_tests.distributed.tensorflow_loop import CASES, PATTERNS_OF

WORKER = "worker_tensorflow_loop"
RUNS = [(case, pattern) for case in CASES for pattern in PATTERNS_OF[case]]


@pytest.fixture(scope="module", params=["replicas", "processes"])
def folder(request, tmp_path_factory):
    """Where the workers have written the states of all replicas."""
    folder = str(tmp_path_factory.mktemp(request.param))
    if request.param == "replicas":
        launch.run(WORKER, [folder])
    else:
        ports = launch.free_ports(2)
        launch.run(WORKER, [folder, "0", *ports], [folder, "1", *ports])
    return folder


@pytest.fixture(scope="module")
def references():
    """What a single process records."""
    return {
        (case, pattern): columns
        for case in CASES
        for pattern, columns in tensorflow_loop.reference(case, participants=2)
    }


@pytest.mark.parametrize(("case", "pattern"), RUNS)
def test_replicas_agree_and_train_right(folder, references, case, pattern):
    first, second = (problem.load(f"{folder}/{case} {pattern} {r}.npz") for r in (0, 1))
    problem.assert_bitwise_equal(second, first)
    reference = references[case, pattern]
    if case != "float16":
        problem.assert_right(first, pattern, 2, reference)
        return
    # Each rounds its own gradients to float16, which has 11 bits.
    for column, expected in zip(first, reference, strict=True):
        assert np.isfinite(column).all()
        np.testing.assert_allclose(column, expected, rtol=0, atol=4 * 2.0**-11)
