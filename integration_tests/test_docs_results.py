"""The numbers of the documentation equal the results in `benchmarks/results/`."""

import functools
import importlib
import itertools
import sys
from collections import defaultdict
from unittest import mock

import numpy as np
import pytest

import keras_lso
from benchmarks import evidence, masters, rounding, spikes_healthy
from benchmarks.accelerators import __main__ as accelerators
from integration_tests.docs_blocks import BACKEND, PAGES, ROOT, code_in, table_of
from testing.spikes import Model

FILES = sorted(evidence.RESULTS.rglob("*.json"))
MOVED, HELD = map(accelerators.read, (accelerators.MOVED, accelerators.HELD))
RECIPE = ("policy", "masters", "slots")

ROUNDING = evidence.read(rounding.RESULTS)["rows"]
LOSSES = {
    (setup, column): [
        r[column] for r in ROUNDING if r["setup"] == setup and column in r
    ]
    for setup in rounding.SETUPS
    for column in rounding.TASKS
}
HIGH, LOW, CONVNET = rounding.TASKS

SPIKES = evidence.read(spikes_healthy.RESULTS)
HEALTHY = [row for row in SPIKES["rows"] if "would_skip" in row]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_result_says_what_it_comes_from(path):
    found = evidence.read(path)
    assert found["command"] and found["commit"]
    assert found["machine"]["processor"] and found["machine"]["packages"]["keras"]


# --- Tables ---------------------------------------------------------------------------


def moved_bytes():
    recipes, cells = {}, {}
    for target, rows in MOVED.items():
        for row in rows:
            recipe = row["recipe"]
            if row["row"] == "keras_lso":
                recipes[recipe] = f"{row['least']:.1f}"
                cells[recipe, target] = f"{row['bytes']:.1f}"
            else:
                cells[recipe, target] += f" ({row['bytes']:.1f})"
    return [
        [recipe, *(cells.get((recipe, target), "") for target in MOVED), least]
        for recipe, least in recipes.items()
    ]


def held_bytes():
    recipes, cells = {}, {}
    for target, rows in HELD.items():
        for row in rows:
            recipe = tuple(row[name] for name in RECIPE)
            both = [row["computed"], row["arguments"]]
            assert recipes.setdefault(recipe, both) == both
            cells[recipe, target] = [row["temporaries"], row["peak"]]
    lines = []
    for recipe, numbers in recipes.items():
        planned = [cells.get((recipe, target), ["", ""]) for target in HELD]
        numbers = [*numbers, *itertools.chain(*planned)]
        lines.append([*recipe, *(n and f"{n:.1f}" for n in numbers)])
    return lines


@functools.cache
def transformer():
    """Returns the example that trains in bfloat16, and its results."""
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        example = importlib.import_module("bfloat16_transformer")
    files = (evidence.RESULTS / example.__name__).glob("*.json")
    return example, [r for f in sorted(files) for r in evidence.read(f)["results"]]


def bfloat16_set_ups():
    example, results = transformer()
    cells = [column.cells for column in example.make_table(results).columns]
    names = {"jax": "JAX", "torch": "PyTorch"}
    rows = ([str(cell).strip() for cell in row] for row in zip(*cells, strict=True))
    return [[names[backend], *row] for backend, *row in rows]


def masters_on_pytorch():
    [file] = evidence.RESULTS.glob("steps/torch-masters-*.json")
    lines = []
    for group in evidence.read(file)["masters"]:
        times = {row["name"]: f"{row['ms']:.3g}" for row in group["rows"]}
        compiled = {name: times.get(f"{name}, compiled") for name in masters.ROWS}
        cells = (times[n] + (f" ({c})" if c else "") for n, c in compiled.items())
        if group["dtype"] == "bfloat16":
            lines.append([group["inner"], *cells])
    return lines


# By their first headings.
TABLES = {
    "recipe": moved_bytes,
    "dtype policy | masters": held_bytes,
    "backend | set-up": bfloat16_set_ups,
    "inner | without": masters_on_pytorch,
    "rounding": lambda: rounding.table(ROUNDING),
    "rule": lambda: spikes_healthy.table(SPIKES),
}


def table_with(headings):
    """Returns the rows of the table that begins with these headings, on any page."""
    [page] = [p for p, f in PAGES.items() if f"\n| {headings} |" in f.read_text()]
    return table_of(page, headings)


@pytest.mark.parametrize("headings", TABLES)
def test_table_equals_recorded_results(headings):
    assert table_with(headings) == TABLES[headings]()


def test_computed_bytes_equal_those_of_kinds_of_masters():
    said = {}
    for policies, kinds, *_, whole in table_with("dtype policy | `master_weights`"):
        [kind] = code_in(kinds) or [kinds]
        float32_slots, *bfloat16_slots = whole.rstrip(")").split(" (")
        for policy in code_in(policies):
            recipe = policy.strip('"'), kind.strip('"')
            said[*recipe, "float32"] = float(float32_slots)
            said[*recipe, "bfloat16"] = float(*bfloat16_slots or [float32_slots])
    for row in HELD["H200"]:
        policy, kind, slots = (row[name] for name in RECIPE)
        if policy != "bfloat16":
            kind = "any"
        elif "alone" in kind:
            kind = "False"
        assert round(row["computed"], 1) == said[policy, kind, slots]


# --- Sentences ------------------------------------------------------------------------


def text_of(page):
    return " ".join(PAGES[page].read_text().split())


def test_pages_say_how_much_better_muon_is():
    found = evidence.read(evidence.RESULTS / "large_batch_transformer" / "jax.json")
    right = {
        (r["optimizer"], r["batch_size"]): 100 * np.mean(r["accuracies"])
        for r in found["results"]
    }
    better = [right["Muon", b] - right["AdamW", b] for o, b in right if o == "Muon"]
    said = f"{min(better):.1f} to {max(better):.1f} points better than AdamW"
    for page in ("docs/benchmarks.md", "docs/large-batches.md"):
        assert said in text_of(page)


def test_one_process_and_two_have_one_curve():
    found = evidence.read(evidence.RESULTS / "one_curve" / "torch.json")["results"]
    losses = np.array([run["losses"] for run in found.values()])
    apart = np.ceil(1e4 * np.abs(losses - losses[0]).max()) / 1e4
    assert f"differs by more than {apart:.4f}" in text_of("docs/examples.md")
    assert {run["skipped_steps"] for run in found.values()} == {1}


def test_every_kind_ends_within_what_page_says_of_float32():
    example, results = transformer()
    with_masters = [r for r in results if "alone" not in r["setup"]]
    apart = np.abs([example.above_float32(r, results) for r in with_masters])
    text = text_of("docs/bfloat16.md")
    most = np.ceil(1e3 * apart.max()) / 1e3
    assert f"within {most:.3f} of float32" in text
    [last] = [
        np.array(r["losses"])[:, -1]
        for r in results
        if (r["backend"], r["setup"]) == ("jax", example.FLOAT32)
    ]
    assert f"are {np.ptp(last):.3f} apart" in text


def test_small_rate_stops_nearest_rounding_which_is_cheaper_at_large_rate():
    assert min(LOSSES["nearest", LOW]) > 20 * max(LOSSES["nearest", HIGH])
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


def test_default_threshold_skips_one_good_step_in_500():
    guard, steps = keras_lso.SpikeGuard(), SPIKES["steps"] * len(HEALTHY)
    assert f"{steps:,} healthy steps" in text_of("docs/long-runs.md")
    skipped = (r["would_skip"][f"SpikeGuard, {guard.threshold:g}"] for r in HEALTHY)
    assert steps / sum(skipped) == pytest.approx(500, rel=0.05)


def test_skipped_good_steps_change_loss_less_than_another_seed():
    table = {rule: cells for rule, *cells in spikes_healthy.table(SPIKES)}
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
    assert said.format(*spreads) in text_of("docs/long-runs.md")


def test_guard_does_not_see_norms_that_grow_slowly():
    noise = np.exp(0.2 * np.random.default_rng(0).normal(size=1000))
    level = 1.005 ** np.arange(1000)
    model = Model(keras_lso.SpikeGuard())
    assert all(model.applies(norm) for norm in noise * level)
    assert level[-1] > 100
    # The same growth at once is an outlier.
    assert not model.applies(10 * level[-1])


# --- The scripts still give what is recorded ------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "jax", reason="the benchmark's step is JAX's")
def test_regression_in_float32_equals_recorded_results():
    found = [loss for _, loss in rounding.train(rounding.TASKS[LOW], "float32")]
    assert found == pytest.approx(LOSSES["float32", LOW], rel=1e-3)


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
