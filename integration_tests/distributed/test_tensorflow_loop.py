"""Loops under `MirroredStrategy` and `MultiWorkerMirroredStrategy`, of two replicas.

After every step the replicas hold the same, bit for bit, and what a single process
holds that trains on their batches together.
"""

import numpy as np
import pytest

from integration_tests.distributed import launch, problem, tensorflow_loop
from integration_tests.distributed.tensorflow_loop import CASES, PATTERNS_OF

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

WORKER = "worker_tensorflow_loop"
RUNS = [(case, pattern) for case in CASES for pattern in PATTERNS_OF[case]]


@pytest.fixture(scope="module", params=["replicas", "processes"])
def run(request, tmp_path_factory):
    """The folder of all replicas' states, and what each process prints."""
    folder = str(tmp_path_factory.mktemp(request.param))
    printed = launch.run(WORKER, *([folder, *a] for a in addresses(request.param)))
    return folder, [r for p in printed for r in launch.lines_of(p, "RESULT")]


def addresses(kind):
    """Returns for each process the arguments by which they find each other."""
    if kind == "replicas":
        return [[]]
    ports = launch.free_ports(2)
    return [["0", *ports], ["1", *ports]]


@pytest.fixture(scope="module")
def references():
    """What a single process records."""
    return {
        (case, pattern): columns
        for case in CASES
        for pattern, columns in tensorflow_loop.reference(case, participants=2)
    }


@pytest.mark.parametrize("case, pattern", RUNS)
def test_replicas_are_bitwise_equal_and_match_single_process(
    run, references, case, pattern
):
    folder, results = run
    if case not in results[0]["collectives"]:
        pytest.skip("TensorFlow broadcasts no bfloat16 between processes")
    first, second = (problem.load(f"{folder}/{case} {pattern} {r}.npz") for r in (0, 1))
    problem.assert_bitwise_equal(second, first)
    reference = references[case, pattern]
    bits = {"float16": 11, "remainder": 8, "stochastic": 8, "slots": 8, "int8": 8}
    bits = bits.get("int8" if case == "24 bits" else case)
    if bits is None:
        problem.assert_right(first, pattern, 2, reference)
        return
    # Each rounds its own gradients. Remainders are those of the rounding, and numbers
    # in 8 bits are shares of the largest of their blocks.
    for column, expected in zip(first, reference, strict=True):
        assert np.isfinite(column).all()
        if column.dtype not in ("int16", "int8", "uint8"):
            np.testing.assert_allclose(column, expected, rtol=0, atol=4 * 2.0**-bits)


def test_overflow_agreement_adds_at_most_one_collective(run):
    _, results = run
    for result in results:
        # The gradients are one exchange, and in their sum all find the overflow. Where
        # the caller has added them up, there is one more, of a number.
        assert result["collectives"] == {
            case: 2 if case.startswith("reduced") else 1
            for case in result["collectives"]
        }


def of_replicas(run, name):
    """Returns what became of the gradients `name` on each of the two replicas."""
    _, results = run
    in_steps = [
        [[values, applied] for values in of_process]
        for result in results
        for of_process, applied in [result[name]]
    ]
    return [replica for of_process in in_steps for replica in of_process]


def test_overflow_of_gradient_sum_over_replicas_skips_step(run):
    # 2 * 3e38 is above float32's largest number. What moves would be 1.0 by 0.5.
    assert of_replicas(run, "sum overflows") == [[[[1.0, -0.0]], 0]] * 2
    # 2 * 60000 is above float16's.
    assert of_replicas(run, "sum of float16") == [[[[1.0 - 60000.0, -0.0]], 1]] * 2


def test_sparse_rows_of_all_replicas_are_summed(run):
    # Row 0 has (5, 6) on the second replica; row 2 has (1, 2) and (3, 4) on the first,
    # (7, 8) on the second. Row 1 has none, nor has the other variable.
    step = np.array([[5, 6], [0, 0], [11, 14]]) * 0.5
    once, twice = 1.0 - step, 1.0 - step - 1.5 * step
    for i, (table, applied) in enumerate([(once, 1), (once, 1), (twice, 2)]):
        expected = [[table.tolist(), [5.0]], applied]
        assert of_replicas(run, f"sparse {i}") == [expected] * 2, i


def test_overwritten_variable_keeps_value_if_new_one_is_not_finite(run):
    for i in range(3):
        # (4 + 6) / 2, and the other variable's gradients are 1 on each.
        assert of_replicas(run, f"overwriting {i}") == [[[[0.0, 0.0], 5.0], 1]] * 2, i
