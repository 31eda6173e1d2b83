"""A smoke test for each tool, for the machinery of the tests and for the benchmarks.

A source distribution has neither tools nor benchmarks.
"""

import itertools
import json
import pathlib
import types

import keras
import pytest

from testing import tiers

pytest.importorskip("tools")

from benchmarks import evidence, pages, rounding, spikes_healthy
from benchmarks.__main__ import main as benchmark
from benchmarks.accelerators import __main__ as accelerators
from benchmarks.accelerators import kernels
from benchmarks.accelerators.program import Program
from tools import add_site, mutate_changed, run_jobs

ROOT = pathlib.Path(__file__).parents[1]


def test_site_of_newest_release_becomes_latest(tmp_path):
    site, versions = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    versions.mkdir()
    for ref in ("v0.10.0", "v0.9.0", "main"):
        (site / "index.html").write_text(ref)
        add_site.add(site, versions, ref)
    assert (versions / "latest" / "index.html").read_text() == "v0.10.0"
    listed = json.loads((versions / "versions.json").read_text())
    assert [each["version"] for each in listed] == ["dev", "0.10.0", "0.9.0"]


def test_jobs_are_run_and_failed_job_is_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_jobs, "FOLDER", tmp_path / "jobs")
    passing = '@echo "= 12 passed, 3 skipped in 65.43s ="'
    makefile = f"passing:\n\t{passing}\nfailing:\n\t@echo traceback; exit 1\n"
    (tmp_path / "Makefile").write_text(makefile)
    assert run_jobs.main(["passing"]) == 0
    assert "12 passed, 3 skipped" in capfd.readouterr().out
    assert run_jobs.main(["failing", "passing"]) == 1
    printed = capfd.readouterr().out
    assert "traceback" in printed and "Failed: failing." in printed


@pytest.mark.parametrize(
    "file, tests",
    [
        ("optimizers/lamb.py", "optimizers"),
        ("loss_scales/dynamic.py", "test_dynamic_loss_scale.py"),
        ("_core/flag.py", "_core"),
    ],
)
def test_tests_of_mutated_file_are_found_by_name_or_folder(file, tests):
    assert mutate_changed.tests_of(f"keras_lso/{file}", ROOT) == [f"tests/{tests}"]


def test_exhaustive_cases_cover_every_value_of_every_argument(monkeypatch):
    arguments = {"a": [object() for _ in range(5)], "b": [{}, {}, []], "c": [1.0, None]}
    parent = types.SimpleNamespace(nodeid="test_file.py")
    items = [
        Item(
            parent=parent,
            originalname="test",
            callspec=types.SimpleNamespace(params=dict(zip(arguments, v, strict=True))),
            get_closest_marker=lambda name: name == "exhaustive",
        )
        for v in itertools.product(*arguments.values())
    ]
    left_out = tiers.combinations_left_out(items)
    chosen = [item.callspec.params for item in items if item not in left_out]
    assert len(chosen) == 5
    for name, values in arguments.items():
        assert {id(c[name]) for c in chosen} == {id(value) for value in values}
    monkeypatch.setattr(tiers, "MANY", 4)
    halves = []
    for backend in tiers.HALVES:
        monkeypatch.setattr(tiers, "BACKEND", backend)
        halves.append(set(items) - tiers.combinations_left_out(items))
    assert set.union(*halves) == set(items) - left_out
    assert sorted(map(len, halves)) == [2, 3]


class Item:
    """Stands for pytest's, which is hashed by its identity."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_benchmark_measures_and_prints_steps_of_tiny_tensors(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["--smoke", "--kinds", "float16", "--modes", "eager", "jit", "graph"]
    # It is 1 where a part has failed.
    assert benchmark([*arguments, "--parts", "steps", "--out", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["command"].startswith("python -m benchmarks --smoke --kinds float16")
    assert result["machine"]["packages"]["keras"] and "commit" in result
    [group] = result["groups"]
    assert [row["role"] for row in group["rows"]][:3] == ["inner", "keras", "ours"]
    assert all(row["ms"] > 0 and row["bytes"] > 0 for row in group["rows"])
    assert "keras_lso" in capsys.readouterr().out


def test_stored_results_of_accelerators_meet_promised_limits():
    found = accelerators.read(accelerators.MOVED)
    assert list(found) == list(accelerators.TARGETS)
    for target in found.keys() - {"PyTorch"}:
        ours = [row for row in found[target] if row["row"] == "keras_lso"]
        assert ours
        for row in ours:
            # A TPU lays the blocks of 8-bit moments out anew.
            are_moved = "TPU" in target and "int8" in row["recipe"]
            assert row["conditionals"] == row["host transfers"] == 0
            assert row["bytes"] <= row["least"] + (32 if are_moved else 15)


def test_stored_steps_on_shared_state_reduce_each_gradient_to_parts():
    found = accelerators.read(accelerators.SHARED)
    assert list(found) == list(accelerators.SHARES)
    for rows in found.values():
        assert len(rows) == 6
        for whole, shared in zip(rows[::2], rows[1::2], strict=True):
            assert not whole["shard_state"] and shared["shard_state"]
            assert whole["reduce-scatter"] == whole["all-gather"] == 0
            # Of tensors that are too small, and a flag.
            assert shared["all-reduce"] < 0.01
            assert shared["peak"] < whole["peak"]
            # Weights, gradients and the state, part of which a step need not hold.
            assert shared["peak"] <= shared["computed"]
            if shared["policy"] == "bfloat16":
                assert shared["sent"] <= whole["sent"] + 0.1


def test_messages_of_program_are_counted_in_all_of_its_computations():
    text = """\
HloModule step, entry_computation_layout={(f32[8])->f32[8]}
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%all-reduce-scatter.1 (input: bf16[16,4]) -> bf16[4,4] {
  %input = bf16[16,4]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[16,4]{1,0} all-reduce(%input), to_apply=%add
  ROOT %part = bf16[4,4]{1,0} dynamic-slice(%all-reduce.1)
}
ENTRY %main (x: f32[8], y: bf16[16,4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = bf16[16,4]{1,0} parameter(1)
  %part.1 = bf16[4,4]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %start = ((f32[8]{0}, bf16[4,4]{1,0}), (f32[32]{0}, bf16[16,4]{1,0})) \
all-gather-start(%x, %part.1), dimensions={0}
  %done = (f32[32]{0}, bf16[16,4]{1,0}) all-gather-done(%start)
  ROOT %r = f32[8]{0} all-reduce(%x), to_apply=%add
}
"""
    program = Program(text)
    assert sorted(program.messages()) == [
        ("all-gather", 32 + 32),
        ("all-reduce", 32),
        ("reduce-scatter", 128),
    ]
    assert "all-reduce.1" not in program.instructions
    assert len(program.instructions) == 6


def test_stored_compiled_steps_are_one_kernel_each_without_spills():
    rows = evidence.read(kernels.RESULTS)["rows"]
    steps = [tuple(row[name] for name in kernels.HEADINGS) for row in rows]
    assert steps == kernels.STEPS
    assert kernels.faults(rows) == []


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"kernels": 2}, "Adam, float16, float32: 2 kernels"),
        ({"kernels": 2, "step": "LARS"}, None),
        ({"spilled": 8}, "Adam, float16, float32: spills 8 bytes a thread"),
        ({"kernels": 0, "registers": []}, "Adam, float16, float32: not compiled"),
    ],
)
def test_compiled_step_that_is_not_one_kernel_without_spills_is_fault(change, fault):
    row = dict(zip(kernels.HEADINGS, ("Adam", "float16", None, "float32"), strict=True))
    row |= {"kernels": 1, "registers": [30], "spilled": 0}
    assert kernels.faults([row]) == []
    assert kernels.faults([row | change]) == ([fault] if fault else [])


# --- Recorded results ---------------------------------------------------------------


TABLE = """# Page

| rule | other |
| --- | --- |
| {} | 1 |

| name | of | ms |
| --- | --- | ---: |
| b | c | {} |
| a | c | {} |
"""


def test_pages_that_are_not_current_fail_and_are_renewed(tmp_path, monkeypatch, capsys):
    page, readme = tmp_path / "docs" / "page.md", tmp_path / "README.md"
    page.parent.mkdir()
    page.write_text(TABLE.format("old", 1, 2))
    readme.write_text("# Nothing\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "TABLES", {"rule": lambda: [["new", "1"]]})
    # The page chooses two of the rows, and has them in its own order.
    rows = [["a", "c", "3"], ["a", "d", "4"], ["b", "c", "5"]]
    monkeypatch.setattr(pages.selected, "TABLES", {"name | of": lambda: rows})
    pages._rows.cache_clear()
    assert pages.main(["--check"]) == 1
    assert "docs/page.md" in capsys.readouterr().err
    assert page.read_text() == TABLE.format("old", 1, 2)
    assert pages.main([]) == 0 == pages.main(["--check"])
    assert page.read_text() == TABLE.format("new", 5, 3)
    page.write_text("# Page\n")
    assert pages.main([]) == 1
    assert "On no page: ['name | of', 'rule']" in capsys.readouterr().err
    pages._rows.cache_clear()


of_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the benchmark's step is JAX's"
)


@pytest.mark.full
@of_jax
def test_regression_in_float32_equals_recorded_results():
    _, low, _ = rounding.TASKS
    rows = evidence.read(rounding.RESULTS)["rows"]
    recorded = [r[low] for r in rows if r["setup"] == "float32" and low in r]
    losses = [loss for _, loss in rounding.train(rounding.TASKS[low], "float32")]
    assert losses == pytest.approx(recorded, rel=1e-3)


@pytest.mark.full
@of_jax
def test_rule_that_skips_nothing_ends_as_run_without_guard():
    rules = (spikes_healthy.NO_GUARD, "SpikeGuard, 6", "OLMo-core, 6")
    task, ends = spikes_healthy.convnet(), []
    for rule in rules:
        row, losses, _ = spikes_healthy.Trainer(task, rule, 40).run(3e-3, 0)
        ends.append(row["final_loss"])
        assert row["good_skipped"] == row["damaged_skipped"] == 0
    assert ends[0] == ends[1] == ends[2] < losses[0]
