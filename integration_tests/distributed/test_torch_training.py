"""Two PyTorch processes: `DistributedDataParallel` and FSDP2.

With DDP each process has all of the averaged gradients. With FSDP2 it sees a part of
them, and an overflow there only.
"""

import functools

import numpy as np
import pytest

from integration_tests.distributed import launch, problem, torch_training
from integration_tests.distributed.torch_training import CASES, NARROW_SLOTS

# The number of arrays of the shape of each variable: itself, and its slots.
SHARDED = {"global_clipnorm": 1, "accumulating": 4}
SHARDED |= dict.fromkeys(("Adam", "spikes", NARROW_SLOTS), 3)


@pytest.fixture(scope="module")
def columns_of(tmp_path_factory):
    """`columns_of(engine, case)`: the record of each of two processes."""
    folders = {}

    def load(engine, case):
        if engine not in folders:
            folders[engine] = tmp_path_factory.mktemp(engine)
            arguments = "worker_torch_training", folders[engine], engine
            launch.run_pair(*arguments, OMP_NUM_THREADS="1")
        return [
            problem.load(folders[engine] / f"{case.name}_{rank}.npz")
            for rank in range(2)
        ]

    return load


@functools.cache
def alone(case):
    return torch_training.train_alone(case)


@pytest.mark.parametrize(
    "engine, case",
    [pytest.param(e, c, id=f"{e}: {c.name}") for e in CASES for c in CASES[e]],
)
def test_training_in_two_processes_matches_single_process(columns_of, engine, case):
    expected = alone(case._replace(where="loss", network="plain"))
    columns, halves = problem.joined(*columns_of(engine, case), expected)
    assert halves == (4 * SHARDED.get(case.optimizer, 2) if engine == "fsdp" else 0)
    if case.optimizer != "accumulating":
        problem.assert_right(columns, case.pattern, 2, expected)
        return
    # Of two steps that are applied, the second moves the weights.
    assert all(np.isfinite(column).all() for column in columns)
    problem.assert_near(columns, expected)
