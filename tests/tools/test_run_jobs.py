"""Several targets of a Makefile at a time, and what is printed of them."""

import re

import pytest

# A source distribution has no tools.
pytest.importorskip("tools")

from tools import run_jobs

pytestmark = pytest.mark.one_backend

MAKEFILE = """
passing:
	@echo "= 1 passed in 0.10s ="
	@echo "====== 12 passed, 3 skipped, 1 warning in 65.43s (0:01:05) ======"
failing:
	@echo "a traceback"
	@echo "====== 1 failed, 2 passed in 1.00s ======"
	@exit 1
lint:
	@echo "No function is too long."
# Each of the two ends when the other has begun.
first:
	@touch first; until test -e second; do sleep 0.01; done
second:
	@touch second; until test -e first; do sleep 0.01; done
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.chdir(tmp_path)
    # Of the `make` that runs this test.
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_jobs, "FOLDER", tmp_path / "jobs")
    return tmp_path / "jobs"


def rows(output):
    return output.partition("All jobs:\n")[2].splitlines()


def test_summary_row_has_result_seconds_and_counts(capfd, folder):
    assert run_jobs.main(["passing", "lint"]) == 0
    printed = capfd.readouterr().out
    first, second = rows(printed)
    counts = "12 passed, 3 skipped, 1 warning"
    assert re.fullmatch(rf"passing +passed +\d+ s  {counts}", first)
    assert re.fullmatch(r"lint +passed +\d+ s", second)
    # A passing job prints no more, and its output is kept.
    assert "No function" not in printed
    assert "No function is too long." in (folder / "lint.txt").read_text()


def test_failing_job_is_shown_and_other_jobs_run(capfd):
    assert run_jobs.main(["--at-once", "1", "failing", "lint"]) == 1
    printed = capfd.readouterr().out
    assert printed.index("a traceback") < printed.index("lint")
    first, second = rows(printed)
    assert re.fullmatch(r"failing +failed +\d+ s  1 failed, 2 passed", first)
    assert "passed" in second


def test_unknown_job_fails(capfd):
    assert run_jobs.main(["nothing"]) == 1
    printed = capfd.readouterr().out
    assert "No rule to make target" in printed
    assert re.fullmatch(r"nothing +failed +\d+ s", rows(printed)[0])


def test_jobs_run_in_parallel():
    assert run_jobs.main(["--at-once", "2", "first", "second"]) == 0
