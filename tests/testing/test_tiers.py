"""What the marks leave to `make test-full`, and what they must not."""

import collections
import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from testing import tiers

ROOT = pathlib.Path(__file__).parents[2]
EXHAUSTIVE, FULL = pytest.mark.exhaustive, pytest.mark.full
TURN = pytest.mark.in_turn
ANY, JAX = pytest.mark.one_backend, pytest.mark.default_backend("jax")


class Item:
    """Stands for pytest's: a test with its arguments and marks."""

    parent = types.SimpleNamespace(nodeid="test_file.py")

    def __init__(self, *marks, name="test", **params):
        self.originalname = name
        self.callspec = types.SimpleNamespace(params=params)
        self.nodeid = f"{self.parent.nodeid}::{name}[{params}]"
        self.marks = marks

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)


def test_exhaustive_cases_cover_every_value_of_every_argument():
    arguments = {"a": [object() for _ in range(5)], "b": [{}, {}, []], "c": [1.0, None]}
    items = [
        Item(EXHAUSTIVE, **dict(zip(arguments, values, strict=True)))
        for values in itertools.product(*arguments.values())
    ]
    left_out = tiers.combinations_left_out(items)
    chosen = [item.callspec.params for item in items if item not in left_out]
    for name, values in arguments.items():
        counts = collections.Counter(id(c[name]) for c in chosen)
        assert counts.keys() == {id(value) for value in values}
        # They take turns.
        assert max(counts.values()) - min(counts.values()) <= 1
    assert len(chosen) == 5
    # One alone, as when it is asked for by its name, stays.
    assert tiers.combinations_left_out(items[7:8]) == set()


def cases(count, *marks, name="test"):
    return [Item(*marks, name=name, a=i) for i in range(count)]


def test_cases_take_turns_by_position():
    items = cases(6, TURN) + cases(2, TURN, name="test_other")
    turns = tiers.turns_of(items)
    expected = ["torch", "jax", "tensorflow", "jax", "tensorflow", "torch"]
    assert [turns[item] for item in items] == [[b] for b in [*expected, "torch", "jax"]]
    for item, backend in zip(items, expected, strict=False):
        runs = [b for b in tiers.TURNS if not tiers.is_for_another_run(item, b, turns)]
        assert runs == [backend]
        # With `--all-turns` there are none.
        assert not any(tiers.is_for_another_run(item, b, {}) for b in tiers.TURNS)


@pytest.mark.parametrize("size", [3, 9, 10])
def test_turns_bring_every_argument_value_to_every_backend(size):
    """Each value of an argument comes to each backend."""
    turns = [tiers.turn(position) for position in range(size * 27)]
    for value in range(size):
        assert set(turns[value::size]) == set(tiers.TURNS)
    counts = collections.Counter(turns)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_named_backend_runs_case_and_takes_no_turn():
    named = Item(pytest.mark.in_turn("tensorflow"), a=0)
    both = Item(pytest.mark.in_turn("jax", "torch"), a=1)
    items = [named, both, *cases(2, TURN)]
    turns = tiers.turns_of(items)
    backends = [("tensorflow",), ("jax", "torch"), ["torch"], ["jax"]]
    assert [turns[item] for item in items] == backends


def test_single_case_in_turn_must_name_backend():
    alone = Item(TURN)
    del alone.callspec
    with pytest.raises(pytest.UsageError, match=r"no other cases.*in_turn\(\"jax\"\)"):
        tiers.turns_of([alone])


def test_backend_marks_take_precedence_over_turns():
    for mark, backend in ((ANY, "torch"), (JAX, "jax")):
        items = cases(9, TURN, mark)
        turns = tiers.turns_of(items)
        for item, other in itertools.product(items, tiers.TURNS):
            expected = other != backend
            assert tiers.is_for_another_run(item, other, turns) == expected


# Collects as `make test` does, and writes who runs which case that is not named.
COLLECT = """
import json, pathlib, sys
import pytest
from testing import tiers

class Writer:
    # Before anything is left out.
    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items):
        turns = tiers.turns_of(items).items()
        cases = [i.nodeid for i, t in turns if not i.get_closest_marker("in_turn").args]
        pathlib.Path(sys.argv[1]).write_text(json.dumps(cases))
        return (yield)

pytest.main(["--collect-only", "-q", *sys.argv[2:]], plugins=[Writer()])
"""


@pytest.mark.slow
@pytest.mark.one_backend
def test_cases_that_take_turns_are_same_on_every_backend(tmp_path):
    """Otherwise a case could be at a position that is another backend's on each."""
    folders = [ROOT / "tests", ROOT / "integration_tests"]
    files = [
        path
        for folder in folders
        for path in folder.rglob("test_*.py")
        if "mark.in_turn" in path.read_text() and path != pathlib.Path(__file__)
    ]
    found = {}
    for backend in tiers.TURNS:
        path = tmp_path / backend
        command = [sys.executable, "-c", COLLECT, path, *files]
        environment = {**os.environ, "KERAS_BACKEND": backend}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
        found[backend] = json.loads(path.read_text())
    cases = found["torch"]
    # A source distribution has no integration tests.
    assert len(cases) > (1000 if folders[1].exists() else 300)
    for backend in tiers.TURNS:
        assert found[backend] == cases, "Name the backends: `in_turn(...)`."


@pytest.mark.parametrize(
    "marks, backend, expected",
    [
        ((), "jax", False),
        ((FULL,), "torch", True),
        ((ANY,), "torch", False),
        ((ANY,), "jax", True),
        ((ANY,), "tensorflow", True),
        ((ANY, FULL), "torch", True),
        ((JAX,), "jax", False),
        ((JAX,), "torch", True),
    ],
)
def test_marks_decide_whether_test_is_left_to_another_run(marks, backend, expected):
    assert tiers.is_for_another_run(Item(*marks), backend, {}) == expected
