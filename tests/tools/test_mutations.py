"""The faults are faults, and the command tells who notices one from who does not."""

import ast
import pathlib
import subprocess

import pytest

# A source distribution has no tools.
pytest.importorskip("tools")

from rich.console import Console

from tools import faults, mutations
from tools.faults.fault import Fault

pytestmark = pytest.mark.one_backend

ROOT = pathlib.Path(__file__).parents[2]


# --- The faults -----------------------------------------------------------------


@pytest.mark.parametrize("area", faults.AREAS, ids=lambda area: area.__name__)
def test_each_fault_changes_one_place_in_package(area):
    for fault in area.FAULTS:
        source = (ROOT / fault.file).read_text()
        assert source.count(fault.old) == 1, fault.name
        assert fault.new != fault.old, fault.name
        broken = source.replace(fault.old, fault.new)
        # A change of what is computed, not of how it is written.
        trees = [ast.dump(ast.parse(text)) for text in (source, broken)]
        assert trees[0] != trees[1], fault.name


@pytest.mark.parametrize("area", faults.AREAS, ids=lambda area: area.__name__)
def test_each_fault_names_existing_tests(area):
    for fault in area.FAULTS:
        assert fault.backend in mutations.MODULES, fault.name
        # Whole files would take minutes.
        assert fault.test_names, fault.name
        sources = [(ROOT / file).read_text() for file in fault.test_files]
        for name in fault.test_names:
            assert any(f"def {name}" in source for source in sources), fault.name


def test_fault_names_are_distinct():
    names = [fault.name for fault in faults.ALL]
    assert sorted(set(names)) == sorted(names)


# --- The command ----------------------------------------------------------------

# What stands for Keras and a framework here: nothing.
NOTHING = {"torch": ()}


@pytest.fixture
def project(tmp_path):
    """A checkout with a package and a test, and with changes that nobody committed."""
    files = {
        "toy/__init__.py": (
            "def double(x):\n    return 2 * x\n\n\ndef unseen():\n    1\n"
        ),
        "tests/test_toy.py": (
            "import sys, pytest, toy\n\n\n"
            "def test_it_doubles():\n    assert toy.double(2) == 4\n\n\n"
            "@pytest.mark.parametrize('name', ['keras', 'wave'])\n"
            "def test_little_is_imported(name):\n    assert name not in sys.modules\n"
        ),
        # What `testing/tiers.py` adds here.
        "conftest.py": (
            "def pytest_addoption(parser):\n"
            "    parser.addoption('--all-turns', action='store_true')\n"
        ),
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--strict-markers'\n",
        ".gitignore": "ignored\n__pycache__/\n",
        "ignored": "",
    }
    for name, content in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "project", check=True)
    return tmp_path / "project"


def fault(name, old, new, tests="tests/test_toy.py::test_it_doubles"):
    return Fault(name, "toy/__init__.py", old, new, tests)


FAULTS = {
    fault("noticed", "2 * x", "3 * x"): mutations.KILLED,
    fault("unnoticed", "    1\n", "    2\n"): mutations.SURVIVED,
    # As long as the sound one, and as old.
    fault("noticed again", "2 * x", "4 * x"): mutations.KILLED,
    fault("out of range", "2 * x", "3 * x", "tests/test_toy.py::test_none"): (
        mutations.NO_TEST
    ),
    fault("no package", "def double", "import nothing\ndef double"): (
        mutations.AT_IMPORT
    ),
    fault("fatal", "return 2 * x", "import os; os._exit(3)"): mutations.KILLED,
}


@pytest.mark.slow
def test_run_all_reports_outcome_of_each_fault(project):
    before = (project / "toy/__init__.py").read_text()
    verdicts = mutations.run_all(FAULTS, project, modules=NOTHING)
    assert {f: v.outcome for f, v in verdicts.items()} == FAULTS
    by_name = {fault.name: verdict for fault, verdict in verdicts.items()}
    assert by_name["noticed"].test == "tests/test_toy.py::test_it_doubles"
    assert "No module named 'nothing'" in by_name["no package"].test
    assert by_name["noticed"].seconds > 0
    # All of it in copies.
    assert (project / "toy/__init__.py").read_text() == before
    assert not list(project.rglob("__pycache__"))


@pytest.mark.slow
def test_hanging_fault_is_stopped_at_timeout(project):
    endless = fault("endless", "return 2 * x", "while True: pass")
    [verdict] = mutations.run_all(
        [endless], project, timeout=2, modules=NOTHING
    ).values()
    assert verdict.outcome == mutations.TIMEOUT
    assert verdict.seconds >= 2


@pytest.mark.slow
def test_run_all_imports_only_requested_modules(project):
    sound = fault("sound", "2 * x", "x * 2", "tests/test_toy.py::test_little")
    [verdict] = mutations.run_all([sound], project, modules=NOTHING).values()
    assert verdict.outcome == mutations.SURVIVED
    asked = {"torch": ("wave",)}
    [verdict] = mutations.run_all([sound], project, modules=asked).values()
    assert verdict.test.endswith("test_little_is_imported[wave]")


def test_copy_of_checkout_has_uncommitted_but_no_ignored_files(project, tmp_path):
    subprocess.run(["git", "add", "tests"], cwd=project, check=True)
    (project / "tests/test_toy.py").unlink()
    mutations.copy_checkout(project, tmp_path / "copy")
    names = [str(p.relative_to(tmp_path / "copy")) for p in tmp_path.rglob("copy/**/*")]
    of_toy = ["toy", "toy/__init__.py"]
    assert sorted(names) == [".gitignore", "conftest.py", "pyproject.toml", *of_toy]


def test_fault_without_unique_match_raises_value_error(project):
    for old in ("triple", "def "):
        with pytest.raises(ValueError, match="replaces what occurs"):
            mutations.run_all([fault("bad", old, "")], project, modules=NOTHING)


def test_report_prints_row_for_each_fault(capsys):
    verdicts = {
        fault("first", "a", "b"): mutations.Verdict(mutations.KILLED, "t[1-x]", 1.25),
        fault("second", "c", "d"): mutations.Verdict(mutations.SURVIVED),
    }
    mutations.report(verdicts, Console(width=100))
    printed = capsys.readouterr().out
    [first] = [line for line in printed.splitlines() if "first" in line]
    assert first.split() == ["first", "toy/__init__.py", "killed", "t[1-x]", "1.2"]
    assert "2 faults: 1 killed, 1 survived." in printed


def test_choose_filters_faults_by_text_and_backend():
    every = list(mutations.MODULES)
    assert mutations.choose(None, every) == faults.ALL
    assert {f.backend for f in mutations.choose(None, ["jax"])} == {"jax"}
    chosen = mutations.choose("loss_scales/log_max", every)
    assert {f.file for f in chosen} == {"keras_lso/loss_scales/log_max.py"}
    assert mutations.main(["--only", "no such fault"]) == 2


@pytest.mark.parametrize("outcome", [mutations.SURVIVED, mutations.NO_TEST])
def test_exit_status_is_1_if_fault_survives_or_has_no_test(
    outcome, monkeypatch, capsys
):
    def run_all(chosen, **arguments):
        outcomes = [mutations.KILLED, mutations.TIMEOUT, outcome]
        pairs = zip(chosen, outcomes, strict=False)
        return {fault: mutations.Verdict(found) for fault, found in pairs}

    monkeypatch.setattr(mutations, "run_all", run_all)
    monkeypatch.setattr(mutations, "choose", lambda *_: faults.ALL[:2])
    assert mutations.main([]) == 0
    monkeypatch.setattr(mutations, "choose", lambda *_: faults.ALL[:3])
    assert mutations.main([]) == 1
    assert outcome in capsys.readouterr().out
