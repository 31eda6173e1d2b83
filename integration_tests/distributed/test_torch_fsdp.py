"""FSDP2 on two processes: each sees its own shards, and all of them the same truth."""

import keras
import numpy as np
import pytest

from integration_tests.distributed import launch, problem, torch_training
from integration_tests.distributed.fsdp_cases import CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have recorded every case."""
    folder = tmp_path_factory.mktemp("fsdp")
    arguments = [[str(rank), str(folder)] for rank in range(2)]
    launch.run("worker_torch_fsdp", *arguments, OMP_NUM_THREADS="1")
    return folder


@pytest.fixture(scope="module")
def alone():
    """What one process records, whose gradients are not finite at the same steps."""
    known = {}

    def train(optimizer, pattern):
        if (optimizer, pattern) not in known:
            known[optimizer, pattern] = torch_training.alone(
                lambda: problem.make_optimizer(optimizer),
                [
                    [problem.whole_batch(pattern, step, 2)]
                    for step in range(problem.STEPS)
                ],
            )
        return known[optimizer, pattern]

    return train


def joined(columns, like):
    """Returns the whole of what two processes hold the first and the last rows of.

    What both of them hold as a whole must be the same in every bit.
    """
    whole = []
    assert {len(of_one) for of_one in columns} == {len(like)}
    for first, last, expected in zip(*columns, like, strict=True):
        if first.shape == expected.shape:
            problem.assert_bitwise_equal([first], [last])
            whole.append(first)
        else:
            whole.append(np.concatenate([first, last], axis=1))
    return whole


@pytest.mark.parametrize("case", CASES)
def test_an_overflow_in_any_shard_skips_the_step_on_all(folder, alone, case):
    optimizer, pattern = CASES[case]
    expected = alone(optimizer, pattern)
    columns = [problem.load(folder / f"{case}_{rank}.npz") for rank in range(2)]
    # Kernels, biases and their slots.
    is_sharded = [c.shape != e.shape for c, e in zip(columns[0], expected, strict=True)]
    slots = {"Adam": 8, "global_clipnorm": 0}.get(optimizer, 4)
    assert sum(is_sharded) == 4 + slots
    problem.assert_right(joined(columns, expected), pattern, 2, expected)
