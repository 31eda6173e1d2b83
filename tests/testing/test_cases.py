"""Which cases of a test are one, and which are skipped though they stand for others."""

import collections
import math
import types

import pytest

from testing import cases


class Item:
    """Stands for pytest's: a test with its arguments."""

    parent = types.SimpleNamespace(nodeid="test_file.py")

    def __init__(self, name="test", **params):
        self.originalname = name
        self.nodeid = f"test_file.py::{name}"
        self.callspec = types.SimpleNamespace(params=params)


@pytest.mark.parametrize(
    "value, twin",
    [
        (math.sin, math.sin),
        ((math.sin, math.cos), (math.sin, math.cos)),
        ({"a": [math.sin]}, {"a": [math.sin]}),
        (math.nan, math.nan),
        (0.1 + 0.2, 0.2 + 0.1),
    ],
)
def test_cases_with_same_arguments_are_rejected(value, twin):
    items = [Item(a=1, b=value), Item(a=2, b=value), Item(a=1, b=twin)]
    assert cases.same_cases(items) == [(items[0], items[2])]
    with pytest.raises(pytest.UsageError, match=r"same arguments(.|\n)*::test"):
        cases.pytest_collection_modifyitems(items)


@pytest.mark.parametrize(
    "value, other",
    [
        (math.sin, math.cos),
        (lambda: 0, lambda: 0),
        ((math.sin, None), (math.sin, math.sin)),
        ([math.sin], (math.sin,)),
        (0, False),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
    ],
)
def test_cases_with_similar_arguments_are_accepted(value, other):
    items = [Item(a=value), Item(a=other), Item("another_test", a=value)]
    assert cases.same_cases(items) == []
    cases.pytest_collection_modifyitems(items)


def report(nodeid, *keywords, skipped=False):
    return types.SimpleNamespace(
        nodeid=nodeid, keywords=keywords, skipped=skipped, when="call"
    )


def test_skipped_case_that_represents_others_is_found(monkeypatch):
    monkeypatch.setattr(cases, "SKIPPED", collections.defaultdict(list))
    monkeypatch.setattr(cases, "RUN", set())
    monkeypatch.setattr(cases, "SKIPPED_IN_TURN", [])
    for each in (
        report("a[1]", "exhaustive", skipped=True),
        report("a[2]", "exhaustive"),
        report("a[3]", "exhaustive", skipped=True),
        # All of it is skipped; it stands for itself; there are no combinations.
        report("b[1]", "exhaustive", skipped=True),
        report("c[1]", skipped=True),
        report("c[2]"),
        report("d", "exhaustive", skipped=True),
    ):
        cases.pytest_runtest_logreport(each)
    assert cases.left_to_nobody() == ["a[1]", "a[3]"]
