"""Selects the tests that `make test` leaves to `make test-full`, which gives `--full`.

There are five marks:

- `exhaustive`: one of many combinations of arguments. `make test` runs enough
  combinations to cover each value;
- `full`: too slow for every change;
- `one_backend`: depends on no backend;
- `default_backend("jax")`: a long program for every backend. `make test` runs it only
  under the named backend;
- `in_turn`: one of many cases that are alike on all backends. `make test` runs each
  case under one backend: `in_turn("jax")` names it; without a name the cases of a test
  take turns.
"""

import os
import zlib
from collections import Counter, defaultdict

import keras
import pytest

# The quickest to import, and it compiles nothing.
THE_ONE_BACKEND = "torch"
# The quickest first: a test of one case more than the others gives it to that one.
TURNS = ("torch", "jax", "tensorflow")

# The environment variable that passes `--full` to programs that tests start.
VARIABLE = "KERAS_LSO_TESTS"


def is_full():
    """Whether this process belongs to tests that were started with `--full`."""
    return os.environ.get(VARIABLE) == "full"


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run every combination of arguments, and the tests outside `make test`",
    )
    parser.addoption(
        "--all-turns",
        action="store_true",
        help="run the cases of `in_turn` tests whose turn is another backend's as well",
    )


def pytest_configure(config):
    os.environ[VARIABLE] = "full" if config.getoption("full") else "default"


# First: the cases of a test take turns in the order in which it lists them, whatever is
# deselected or run earlier.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out tests for `--full`, unless they were requested by name."""
    if config.getoption("full"):
        return
    left_out = combinations_left_out(items)
    backend = keras.backend.backend()
    turns = {} if config.getoption("all_turns") else turns_of(items)
    named = {arg.split("[")[0] for arg in config.args if "::" in arg}
    for item in items:
        is_named = item.nodeid.split("[")[0] in named
        if not is_named and is_for_another_run(item, backend, turns):
            left_out.add(item)
    config.hook.pytest_deselected(items=[i for i in items if i in left_out])
    items[:] = [item for item in items if item not in left_out]


def is_for_another_run(item, backend, turns):
    if backends := backends_by_mark(item):
        return backend not in backends
    return backend not in turns.get(item, TURNS)


def backends_by_mark(item):
    """Returns the backends that marks other than `in_turn` name; None for all."""
    if item.get_closest_marker("full"):
        return ["none"]
    if named := item.get_closest_marker("default_backend"):
        return named.args
    if item.get_closest_marker("one_backend"):
        return [THE_ONE_BACKEND]
    return None


def turns_of(items):
    """Returns a dict of the cases of `in_turn` tests to the backends that run them."""
    turns, cases = {}, defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("in_turn")
        if mark is None or backends_by_mark(item):
            continue
        if mark.args:
            turns[item] = mark.args
        elif hasattr(item, "callspec"):
            cases[item.parent.nodeid, item.originalname].append(item)
        else:
            raise pytest.UsageError(
                f"{item.nodeid} has no other cases to take turns with. Name the "
                'backend that runs it: `@pytest.mark.in_turn("jax")`.'
            )
    for listed in cases.values():
        turns.update({item: [turn(at)] for at, item in enumerate(listed)})
    return turns


def turn(position):
    """Returns the backend that runs a case at a position in the list of its test.

    The backend's index is the sum of the position's digits in base three, not the last
    digit: in combinations with an argument of three values, each value then runs under
    each backend.
    """
    total = 0
    while position:
        position, digit = divmod(position, len(TURNS))
        total += digit
    return TURNS[total % len(TURNS)]


def combinations_left_out(items):
    """Returns the combinations of `exhaustive` tests that may be left out.

    The remaining combinations cover each value of each argument at least once. Each
    test begins at another place in its list, so that together they cover more pairs.
    """
    combinations = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") and hasattr(item, "callspec"):
            combinations[item.parent.nodeid, item.originalname].append(item)
    left_out = set()
    for (_, name), alike in combinations.items():
        start = zlib.crc32(name.encode()) % len(alike)
        left_out.update(set(alike) - covering(alike[start:] + alike[:start]))
    return left_out


def covering(items):
    """Returns a set of items in which each value of each argument occurs.

    Of items with as many new values, it takes one whose other values it has taken least
    often: of three ways to compile, each optimizer has one, and no way has them all.
    """
    values = {
        item: {(name, id(value)) for name, value in item.callspec.params.items()}
        for item in items
    }
    wanted = set().union(*values.values())
    chosen, taken = set(), Counter()
    while wanted:
        best = max(
            items,
            key=lambda item: (
                len(values[item] & wanted),
                -sum(map(taken.__getitem__, values[item])),
            ),
        )
        chosen.add(best)
        taken.update(values[best])
        wanted -= values[best]
    return chosen
