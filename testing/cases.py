"""Refuses cases that cannot fail: duplicates, and skipped representatives.

If a backend uses the reference's function, for example, a test of both would compare
the function with itself. The few combinations of an `exhaustive` test that run
represent the others: if one is skipped, no case tests its values. The same holds for a
case of an `in_turn` test that is skipped under the backend whose turn it is.
"""

import collections

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
    """Returns a key that is equal only for identical objects and equal plain values."""
    if isinstance(value, dict):
        return dict, tuple((key, identity(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(identity, value))
    if isinstance(value, str | bytes | int | float | complex | None):
        return type(value), repr(value)
    return id(value)


# The skipped cases of each `exhaustive` test, and the tests with cases that ran.
SKIPPED: dict = collections.defaultdict(list)
RUN = set()
SKIPPED_IN_TURN = []


def pytest_runtest_logreport(report):
    is_expected = hasattr(report, "wasxfail")
    if report.skipped and not is_expected and "in_turn" in report.keywords:
        SKIPPED_IN_TURN.append(report.nodeid)
    if "exhaustive" not in report.keywords or "[" not in report.nodeid:
        return
    test = report.nodeid.split("[")[0]
    if report.skipped:
        SKIPPED[test].append(report.nodeid)
    elif report.when == "call":
        RUN.add(test)


def left_to_nobody():
    """Returns the skipped cases that represent others, or whose turn it was."""
    exhaustive = [cases for test, cases in SKIPPED.items() if test in RUN]
    return list(dict.fromkeys([*SKIPPED_IN_TURN, *sum(exhaustive, [])]))


def pytest_sessionfinish(session):
    if left_to_nobody() and not session.config.getoption("full"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    cases = left_to_nobody()
    if cases and not config.getoption("full"):
        terminalreporter.section("skipped, and left to nobody", red=True)
        terminalreporter.line(
            "These are `exhaustive` and represent other combinations of their values, "
            "or `in_turn` and run under no other backend. Leave values that the "
            "backend lacks out of the parametrisation, or remove the mark."
        )
        for case in cases:
            terminalreporter.line(f"  {case}")
