"""A smoke test for each tool, for the machinery of the tests and for the benchmarks.

A source distribution has neither tools nor benchmarks.
"""

import itertools
import json
import pathlib
import types

import pytest

from testing import tiers

pytest.importorskip("tools")

from benchmarks import evidence
from benchmarks.__main__ import main as benchmark
from benchmarks.accelerators import __main__ as accelerators
from benchmarks.accelerators import kernels
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


def test_exhaustive_cases_cover_every_value_of_every_argument():
    arguments = {"a": [object() for _ in range(5)], "b": [{}, {}, []], "c": [1.0, None]}
    mark, parent = types.SimpleNamespace(), types.SimpleNamespace(nodeid="test_file.py")
    items = [
        Item(
            parent=parent,
            originalname="test",
            callspec=types.SimpleNamespace(params=dict(zip(arguments, v, strict=True))),
            get_closest_marker=lambda name: mark,
        )
        for v in itertools.product(*arguments.values())
    ]
    left_out = tiers.combinations_left_out(items)
    chosen = [item.callspec.params for item in items if item not in left_out]
    assert len(chosen) == 5
    for name, values in arguments.items():
        assert {id(c[name]) for c in chosen} == {id(value) for value in values}


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
    for rows in (found[t] for t in found if t != "PyTorch"):
        ours = [row for row in rows if row["row"] == "keras_lso"]
        assert ours
        for row in ours:
            assert row["conditionals"] == row["host transfers"] == 0
            assert row["bytes"] <= row["least"] + 15


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
