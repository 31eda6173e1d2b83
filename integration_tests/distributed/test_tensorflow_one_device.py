"""Strategies of one device: what runs on every machine with one GPU.

They have nothing to share out, so each run is the one without a strategy, bit for bit.
Keras's own wrapper runs there; what Keras's optimizers alone do not (accumulation and
averages, whose steps branch by themselves) runs inside of ours.
"""

import pytest

from integration_tests.distributed import launch
from integration_tests.distributed.tensorflow_fit import SKIPPED_AFTER
from integration_tests.distributed.tensorflow_one_device import runs_of

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def is_exhaustive(request):
    return request.config.getoption("full")


@pytest.fixture(scope="module")
def printed(is_exhaustive, tmp_path_factory):
    return launch.run_afresh(
        "worker_tensorflow_one_device",
        lambda: tmp_path_factory.mktemp("one_device"),
        *(["all"] if is_exhaustive else []),
    )


def test_strategy_of_one_device_trains_like_no_strategy(printed, is_exhaustive):
    lines = launch.lines_of(printed, "RUN")
    assert len(lines) == sum(len(cases) for *_, cases in runs_of(is_exhaustive))
    for strategy, *where, found in lines:
        assert isinstance(found, dict), (strategy, *where, found)
        # TensorFlow's server may add up a norm in another order: of numbers below 4, a
        # few roundings of float32.
        limit = 4 * 1e-6 if strategy == "parameter server" else 0.0
        assert found["difference"] <= limit, (strategy, *where)
        assert found["was_skipped"], (strategy, *where)
        assert found["has_moved"], (strategy, *where)


def test_fit_under_one_device_strategy_matches_plain_fit(printed, is_exhaustive):
    lines = launch.lines_of(printed, "FIT")
    assert len(lines) == (4 if is_exhaustive else 1)
    for name, jit_compile, is_same, skipped in lines:
        assert is_same, (name, jit_compile)
        assert skipped == SKIPPED_AFTER[-1], (name, jit_compile)


def test_training_op_under_one_device_strategy_matches_no_strategy(printed):
    lines = launch.lines_of(printed, "OP")
    assert len(lines) == 2
    for on_one_device, alone in lines:
        assert on_one_device == alone
        # Two steps; the overflow between them is skipped.
        assert on_one_device == pytest.approx([1 - 0.1 + 0.01, 2 - 0.2 - 0.23])


# What is read under two replicas: `test_tensorflow_fit.py`.
@pytest.mark.full
def test_values_read_after_one_device_fit_match_fit_without_strategy(printed):
    on_one_device, alone = launch.lines_of(printed, "READS")
    assert on_one_device == alone
