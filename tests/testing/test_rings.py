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
    items = [Item(pytest.mark.in_turn, a=i) for i in range(7)]
    others = Item(a=7), Item(ANY, pytest.mark.in_turn), Item(JAX, pytest.mark.in_turn)
    turns = rings.turns_of([*items, *others])
    assert list(turns) == items
    counts = collections.Counter(turns.values())
    assert set(counts) == {"tensorflow", "jax", "torch"}
    assert sorted(counts.values()) == [2, 2, 3]
    # The next case is for the next backend, and the same in each run.
    assert [turns[item] for item in items[3:]] == [turns[item] for item in items[:4]]
    assert rings.turns_of(items) == turns


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
