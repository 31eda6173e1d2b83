"""What the marks leave to `make test-full`, and what they must not."""

import collections
import itertools
import types

import pytest

from testing import rings

EXHAUSTIVE, FULL = pytest.mark.exhaustive, pytest.mark.full
ANY, JAX = pytest.mark.one_backend, pytest.mark.default_backend("jax")


class Item:
    """Stands for pytest's: a test with its arguments and marks."""

    originalname = "test"
    parent = types.SimpleNamespace(nodeid="test_file.py")

    def __init__(self, *marks, **params):
        self.callspec = types.SimpleNamespace(params=params)
        self.nodeid = f"{self.parent.nodeid}::test[{params}]"
        self.marks = marks

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)


def test_every_value_of_every_argument_is_left():
    arguments = {"a": [object() for _ in range(5)], "b": [{}, {}, []], "c": [1.0, None]}
    items = [
        Item(EXHAUSTIVE, **dict(zip(arguments, values, strict=True)))
        for values in itertools.product(*arguments.values())
    ]
    left_out = rings.combinations_left_out(items)
    chosen = [item.callspec.params for item in items if item not in left_out]
    for name, values in arguments.items():
        assert {id(c[name]) for c in chosen} == {id(value) for value in values}
    assert len(chosen) == 5
    # One alone, as when it is asked for by its name, stays.
    assert rings.combinations_left_out(items[7:8]) == set()


def test_cases_that_run_in_turn_are_shared_out():
    items = [Item(pytest.mark.in_turn, a=i) for i in range(90)]
    counts = collections.Counter()
    for item in items:
        runs = [b for b in rings.TURNS if not rings.is_for_another_run(item, b)]
        assert len(runs) == 1
        counts.update(runs)
        assert not rings.is_for_another_run(item, "jax", all_turns=True)
    # A third each, give or take three standard deviations.
    assert all(17 <= counts[backend] <= 43 for backend in rings.TURNS)


def test_marks_of_a_backend_come_before_turns():
    for mark, backend in ((ANY, "torch"), (JAX, "jax")):
        for number in range(9):
            item = Item(pytest.mark.in_turn, mark, a=number)
            for other in rings.TURNS:
                assert rings.is_for_another_run(item, other) == (other != backend)


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
def test_a_mark_leaves_a_test_to_another_run(marks, backend, expected):
    assert rings.is_for_another_run(Item(*marks), backend) == expected
