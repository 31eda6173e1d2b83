"""Which cases of a test are one, and which only look alike."""

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
def test_the_same_functions_are_the_same_case(value, twin):
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
def test_what_only_looks_alike_is_another_case(value, other):
    items = [Item(a=value), Item(a=other), Item("another_test", a=value)]
    assert cases.same_cases(items) == []
    cases.pytest_collection_modifyitems(items)
