"""Processes that tests start: one that dies of a segmentation fault runs again."""

import itertools

import pytest

from integration_tests.distributed import launch


@pytest.mark.parametrize("deaths", [0, 1, 3])
def test_launch_reruns_crashed_process_with_new_arguments(deaths, tmp_path):
    file, numbers = tmp_path / "deaths", itertools.count()
    file.write_text("")
    printed = launch.run_afresh(
        "worker_dies", lambda: f"folder {next(numbers)}", str(file), str(deaths)
    )
    assert printed.strip() == f"folder {deaths}"
    assert file.read_text() == "x" * deaths


def test_launch_raises_if_process_crashes_on_every_attempt(tmp_path):
    file = tmp_path / "deaths"
    file.write_text("")
    with pytest.raises(AssertionError, match="-11"):
        launch.run_afresh("worker_dies", lambda: "", str(file), "9", attempts=2)
    assert file.read_text() == "xx"
