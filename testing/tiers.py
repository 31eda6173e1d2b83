"""Which tests `make test` leaves to `make test-full`, which gives `--full`.

Five marks tell: `exhaustive`, one of many combinations of arguments, of which some are
enough to see each value; `full`, too slow for every change; `one_backend`, which
depends on no backend; `default_backend("jax")`, a long program that is for each of
them, and that `make test` runs under the one that it names; and `in_turn`, one of many
cases that are alike on all backends, of which `make test` runs each under one:
`in_turn("jax")` names it, and without a name the cases of a test take turns.
"""

import os
import zlib
from collections import defaultdict

import keras
import pytest

# The quickest to import, and it compiles nothing.
THE_ONE_BACKEND = "torch"
# The quickest first: a test of one case more than the others gives it to that one.
TURNS = ("torch", "jax", "tensorflow")

# How the programs that tests start are told of `--full`.
VARIABLE = "KERAS_LSO_TESTS"


def is_full():
    """Whether this process belongs to tests that were started with `--full`."""
    return os.environ.get(VARIABLE) == "full"


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run every combination of arguments, and what `make test` leaves out",
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
    """Leaves out what is for `--full`, unless it was asked for by its name."""
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

    It is the sum of the position's digits to the base of three, not the last of them:
    of combinations with an argument of three values, each value comes to each backend.
    """
    total = 0
    while position:
        position, digit = divmod(position, len(TURNS))
        total += digit
    return TURNS[total % len(TURNS)]


def combinations_left_out(items):
    """Returns those combinations of `exhaustive` tests that the others make up for.

    Those left have each value of each argument in one of them at least. Each test
    begins elsewhere in its list, so that together they see more of the pairs.
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
    """Returns a set of items in which each value of each argument occurs."""
    values = {
        item: {(name, id(value)) for name, value in item.callspec.params.items()}
        for item in items
    }
    wanted = set().union(*values.values())
    chosen = set()
    while wanted:
        best = max(items, key=lambda item: len(values[item] & wanted))
        chosen.add(best)
        wanted -= values[best]
    return chosen
