"""Weights of 16 bits in two PyTorch processes, which hold shards or train replicas."""

import pytest

from integration_tests.distributed import launch
from testing.tiers import is_full

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

KINDS = ["float32", "remainder", "stochastic"]
# The norm of all, or of a weight, is added up in another order.
WITH_NORMS = ("clipped", "LARS", "LAMB", "NovoGrad", "LARC")


@pytest.fixture(
    scope="module",
    params=["framework", pytest.param("generic", marks=pytest.mark.full)],
)
def printed(request, tmp_path_factory):
    """`printed(word)`: what both processes have printed, which must be the same."""
    folder = tmp_path_factory.mktemp("masters")
    arguments = [[str(rank), str(folder)] for rank in range(2)]
    both = launch.run(
        "worker_torch_masters",
        *arguments,
        OMP_NUM_THREADS="1",
        KERAS_LSO_KERNELS=request.param,
    )

    def lines_of(word):
        first, last = (launch.lines_of(one, word) for one in both)
        assert first == last
        return first

    return lines_of


def test_sharded_16_bit_weights_train_like_whole_weights(printed):
    cases = printed("SHARDS")
    assert len(cases) == (22 if is_full() else 3)
    for name, dtype, found in cases:
        for kind in KINDS:
            # Or an element on a boundary is rounded to its other neighbour.
            limit = 2.0**-6 if name in WITH_NORMS else 1e-5
            assert found[kind]["is as alone"] or name in WITH_NORMS, (name, dtype, kind)
            assert found[kind]["distance"] <= limit, (name, dtype, kind)
            assert found[kind]["skipped"] == 2


def test_remainders_of_shards_are_exact(printed):
    for name, dtype, found in printed("SHARDS"):
        assert found["remainders are exact"], (name, dtype)


def test_stand_ins_for_shards_hold_no_memory(printed):
    for name, dtype, found in printed("SHARDS"):
        assert all(found[kind]["memory"] <= 4 for kind in KINDS), (name, dtype)


def test_processes_that_average_gradients_keep_equal_weights(printed):
    results = dict(printed("AVERAGED"))
    assert list(results) == KINDS[1:]
    assert all(skipped == 1 for _, skipped in results.values())
