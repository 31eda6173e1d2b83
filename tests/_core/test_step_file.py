"""A file of steps that cannot be written warns, and loses as little as it can."""

import json

import pytest

from keras_lso._core import step_file
from keras_lso._core.step_record import COLUMNS, RecordFile
from testing.full_disk import full_disk


def rows(*steps):
    return [dict.fromkeys(COLUMNS) | {"step": step} for step in steps]


def test_steps_beyond_most_that_wait_are_lost_with_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(step_file, "_MOST_WAITING", 3)
    path = tmp_path / "a.jsonl"
    file = RecordFile(path)
    file.begin()
    with full_disk():
        with pytest.warns(UserWarning, match="a.jsonl' could not .* 2 steps wait"):
            file.write(rows(1, 2))
        file.write(rows(3, 4))
        file.write(rows(5))
    file.write(rows(6))
    with pytest.warns(UserWarning, match="0 steps wait .* 2 older ones are lost"):
        file.end()
    file.end()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4, 5, 6]


def test_each_time_that_file_cannot_be_written_warns_once(tmp_path):
    file = RecordFile(tmp_path / "a.jsonl")
    file.begin()
    for step in (1, 4):
        with full_disk(), pytest.warns(UserWarning, match="1 steps wait") as caught:
            file.write(rows(step))
            file.write(rows(step + 1))
        assert len(caught) == 1
        file.write(rows(step + 2))
        file.end()
    assert file.read()["step"].tolist() == [1, 2, 3, 4, 5, 6]


def test_file_that_is_always_full_warns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.symlink_to("/dev/full")
    file = RecordFile(path)
    file.begin()
    with pytest.warns(UserWarning, match="No space left"):
        file.write(rows(1))
