"""What docs/long-runs.md says of the threshold of a `SpikeGuard`."""

import json
from collections import defaultdict

import numpy as np
import pytest

import keras_lso
from benchmarks import spikes_healthy
from integration_tests.docs_blocks import BACKEND, PAGES, table_of
from testing.spikes import Model

RESULTS = json.loads(spikes_healthy.RESULTS.read_text())
HEALTHY = [row for row in RESULTS["rows"] if "would_skip" in row]


def test_table_of_rules_equals_recorded_results():
    assert table_of("docs/long-runs.md", "rule") == spikes_healthy.table(RESULTS)


def test_default_threshold_skips_one_good_step_in_500():
    guard, steps = keras_lso.SpikeGuard(), RESULTS["steps"] * len(HEALTHY)
    assert f"{steps:,} healthy steps" in PAGES["docs/long-runs.md"].read_text()
    skipped = (r["would_skip"][f"SpikeGuard, {guard.threshold:g}"] for r in HEALTHY)
    assert steps / sum(skipped) == pytest.approx(500, rel=0.05)


def test_skipped_good_steps_change_loss_less_than_another_seed():
    text = PAGES["docs/long-runs.md"].read_text()
    table = {rule: cells for rule, *cells in spikes_healthy.table(RESULTS)}
    spreads = []
    for model, column in (("Transformer", 3), ("convnet", 5)):
        ends = defaultdict(list)
        for row in HEALTHY:
            if row["model"] == model:
                ends[row["rate"]].append(row["final_loss"])
        # The table has the mean over the rates.
        variances = [np.var(of_rate, ddof=1) for of_rate in ends.values()]
        spreads.append(np.sqrt(sum(variances)) / len(variances))
        without = float(table[spikes_healthy.NO_GUARD][column])
        for rule in spikes_healthy.THRESHOLDS.keys() & table.keys():
            assert abs(float(table[rule][column]) - without) < spreads[-1]
    said = "by {:.3f} for the Transformer and by {:.3f} for the convnet"
    assert said.format(*spreads) in " ".join(text.split())


def test_guard_does_not_see_norms_that_grow_slowly():
    noise = np.exp(0.2 * np.random.default_rng(0).normal(size=1000))
    level = 1.005 ** np.arange(1000)
    model = Model(keras_lso.SpikeGuard())
    assert all(model.applies(norm) for norm in noise * level)
    assert level[-1] > 100
    # The same growth at once is an outlier.
    assert not model.applies(10 * level[-1])


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "jax", reason="the benchmark's step is JAX's")
def test_rule_that_skips_nothing_ends_as_run_without_guard():
    rules = (spikes_healthy.NO_GUARD, "SpikeGuard, 6", "OLMo-core, 6")
    task, ends = spikes_healthy.convnet(), []
    for rule in rules:
        row, losses, norms = spikes_healthy.Trainer(task, rule, 40).run(3e-3, 0)
        ends.append(row["final_loss"])
        assert row["good_skipped"] == row["damaged_skipped"] == 0
    assert ends[0] == ends[1] == ends[2] < losses[0]
