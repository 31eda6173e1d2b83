"""What docs/policies.md says of training with each kind of master."""

import json

import pytest

from benchmarks import rounding
from integration_tests.docs_blocks import BACKEND, table_of

RESULTS = json.loads(rounding.RESULTS.read_text())
LOSSES = {
    (setup, column): [
        r[column] for r in RESULTS["rows"] if r["setup"] == setup and column in r
    ]
    for setup in rounding.SETUPS
    for column in rounding.TASKS
}
HIGH, LOW, CONVNET = rounding.TASKS


def test_table_of_kinds_equals_recorded_results():
    assert table_of("docs/policies.md", "rounding") == rounding.table(RESULTS["rows"])


def test_small_rate_stops_nearest_rounding():
    assert min(LOSSES["nearest", LOW]) > 20 * max(LOSSES["nearest", HIGH])


def test_stochastic_rounding_costs_more_than_nearest_at_large_rate():
    assert min(LOSSES["stochastic", HIGH]) > max(LOSSES["nearest", HIGH])


def test_noise_of_stochastic_rounding_does_not_fall_with_rate():
    high, low = (LOSSES["stochastic", column] for column in (HIGH, LOW))
    assert low == pytest.approx(high, rel=0.15)
    for column in (HIGH, LOW):
        assert LOSSES["remainders", column] == pytest.approx(
            LOSSES["float32 masters", column], rel=0.02
        )
        assert min(LOSSES["stochastic", column]) > max(LOSSES["remainders", column])


def test_convnet_trains_as_in_float32_but_for_nearest_rounding():
    seeds = LOSSES["float32", CONVNET]
    for setup in rounding.SETUPS:
        others = LOSSES[setup, CONVNET]
        if setup == "nearest":
            assert min(others) > 3 * max(seeds)
        else:
            assert max(others) < 1.5 * max(seeds)


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "jax", reason="the benchmark's step is JAX's")
def test_regression_in_float32_equals_recorded_results():
    found = [loss for _, loss in rounding.train(rounding.TASKS[LOW], "float32")]
    assert found == pytest.approx(LOSSES["float32", LOW], rel=1e-3)
