"""Refuses two cases of a test that are one, of which the second sees nothing more.

Where a backend takes the reference's function as its own, say, a test of both would
compare it with itself.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    twins = same_cases(items)
    if twins:
        lines = [f"  {a.nodeid}\n  {b.nodeid}" for a, b in twins]
        raise pytest.UsageError(
            "These cases have the same arguments. Leave one of each out:\n"
            + "\n\n".join(lines)
        )


def same_cases(items):
    """Returns the pairs of cases of one test that have the same arguments."""
    first, pairs = {}, []
    for item in items:
        if hasattr(item, "callspec"):
            arguments = identity(item.callspec.params)
            key = item.parent.nodeid, item.originalname, arguments
            if first.setdefault(key, item) is not item:
                pairs.append((first[key], item))
    return pairs


def identity(value):
    """Returns what only the same objects have in common, and equal plain values."""
    if isinstance(value, dict):
        return dict, tuple((key, identity(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(identity, value))
    if isinstance(value, str | bytes | int | float | complex | None):
        return type(value), repr(value)
    return id(value)
