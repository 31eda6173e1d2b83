"""The tables of the documentation show the results in `benchmarks/results/`."""

import pytest

from benchmarks import evidence, pages, rounding, spikes_healthy
from integration_tests.docs_blocks import BACKEND, PAGES


def test_tables_on_pages_have_rows_of_recorded_results():
    tables = []
    for name, path in PAGES.items():
        text = path.read_text()
        renewed, found = pages.renew(text)
        assert renewed == text, f"{name}: run `python -m benchmarks.pages`"
        tables += found
    assert sorted(tables) == sorted(pages.TABLES)


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "jax", reason="the benchmark's step is JAX's")
def test_regression_in_float32_equals_recorded_results():
    _, low, _ = rounding.TASKS
    rows = evidence.read(rounding.RESULTS)["rows"]
    recorded = [r[low] for r in rows if r["setup"] == "float32" and low in r]
    losses = [loss for _, loss in rounding.train(rounding.TASKS[low], "float32")]
    assert losses == pytest.approx(recorded, rel=1e-3)


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "jax", reason="the benchmark's step is JAX's")
def test_rule_that_skips_nothing_ends_as_run_without_guard():
    rules = (spikes_healthy.NO_GUARD, "SpikeGuard, 6", "OLMo-core, 6")
    task, ends = spikes_healthy.convnet(), []
    for rule in rules:
        row, losses, _ = spikes_healthy.Trainer(task, rule, 40).run(3e-3, 0)
        ends.append(row["final_loss"])
        assert row["good_skipped"] == row["damaged_skipped"] == 0
    assert ends[0] == ends[1] == ends[2] < losses[0]
