"""Two PyTorch processes: `DistributedDataParallel` and FSDP2.

With DDP each process has all of the averaged gradients. With FSDP2 it sees a part of
them, and an overflow there only.
"""

import functools

import numpy as np
import pytest

from integration_tests.distributed import launch, problem, torch_training
from integration_tests.distributed.torch_training import CASES, NARROW_SLOTS

# How many arrays of its shape there are for each variable: itself, and its slots.
SHARDED = {"global_clipnorm": 1, "accumulating": 4}
SHARDED |= dict.fromkeys(("Adam", "spikes", NARROW_SLOTS), 3)


@pytest.fixture(scope="module")
def columns_of(tmp_path_factory):
    """`columns_of(engine, case)`: what each of two processes has recorded."""
    folders = {}

    def load(engine, case):
        if engine not in folders:
            folders[engine] = tmp_path_factory.mktemp(engine)
            arguments = [[str(rank), str(folders[engine]), engine] for rank in range(2)]
            launch.run("worker_torch_training", *arguments, OMP_NUM_THREADS="1")
        return [
            problem.load(folders[engine] / f"{case.name}_{rank}.npz")
            for rank in range(2)
        ]

    return load


@functools.cache
def alone(case):
    return torch_training.train_alone(case)


def as_one(columns, expected):
    """Returns the whole of what two processes hold the first and the last rows of.

    What both of them hold as a whole has to be the same, bit for bit.
    """
    assert {len(of_one) for of_one in columns} == {len(expected)}
    is_whole = [
        first.shape == like.shape
        for first, like in zip(columns[0], expected, strict=True)
    ]
    problem.assert_bitwise_equal(
        *([c for c, w in zip(of_one, is_whole, strict=True) if w] for of_one in columns)
    )
    return is_whole, [
        first if whole else np.concatenate([first, last], axis=1)
        for whole, first, last in zip(is_whole, *columns, strict=True)
    ]


@pytest.mark.parametrize(
    "engine, case",
    [pytest.param(e, c, id=f"{e}: {c.name}") for e in CASES for c in CASES[e]],
)
def test_training_in_two_processes_matches_single_process(columns_of, engine, case):
    expected = alone(case._replace(where="loss", network="plain"))
    is_whole, columns = as_one(columns_of(engine, case), expected)
    sharded = 4 * SHARDED.get(case.optimizer, 2) if engine == "fsdp" else 0
    assert is_whole.count(False) == sharded
    if case.optimizer != "accumulating":
        problem.assert_right(columns, case.pattern, 2, expected)
        return
    # Of two steps that are applied, the second moves the weights.
    assert all(np.isfinite(column).all() for column in columns)
    for i, (column, other) in enumerate(zip(columns, expected, strict=True)):
        # As in `assert_right`: each step's few roundings, of numbers below 4, add up.
        np.testing.assert_allclose(
            column, other, rtol=1e-4, atol=2e-5, err_msg=f"array {i}"
        )
