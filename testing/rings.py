"""Which tests `make test` leaves to `make test-full`, which gives `--full`.

Five marks tell: `exhaustive`, one of many combinations of arguments, of which some are
enough to see each value; `full`, too slow for every change; `one_backend`, which
depends on no backend; `default_backend("jax")`, a long program that is for each of
them, and that `make test` runs under the one that it names; and `in_turn`, one of many
cases that are alike on all backends, of which `make test` runs each under one.
"""

import os
import zlib
from collections import defaultdict

import keras

# The quickest to import, and it compiles nothing.
THE_ONE_BACKEND = "torch"
TURNS = ("tensorflow", "jax", "torch")


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


def pytest_collection_modifyitems(config, items):
    """Leaves out what is for `--full`, unless it was asked for by its name."""
    if config.getoption("full"):
        return
    left_out = combinations_left_out(items)
    backend, all_turns = keras.backend.backend(), config.getoption("all_turns")
    named = {arg.split("[")[0] for arg in config.args if "::" in arg}
    for item in items:
        is_named = item.nodeid.split("[")[0] in named
        if not is_named and is_for_another_run(item, backend, all_turns):
            left_out.add(item)
    config.hook.pytest_deselected(items=[i for i in items if i in left_out])
    items[:] = [item for item in items if item not in left_out]


def is_for_another_run(item, backend, all_turns=False):
    if item.get_closest_marker("full"):
        return True
    if named := item.get_closest_marker("default_backend"):
        return named.args[0] != backend
    if item.get_closest_marker("one_backend"):
        return backend != THE_ONE_BACKEND
    takes_turns = item.get_closest_marker("in_turn") and not all_turns
    return bool(takes_turns) and turn_of(item) != backend


def turn_of(item):
    """Returns under which backend a case of an `in_turn` test runs.

    Its name alone decides: a backend that has fewer cases, or runs them in another
    order, leaves none of them to nobody.
    """
    return TURNS[zlib.crc32(item.nodeid.encode()) % len(TURNS)]


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
