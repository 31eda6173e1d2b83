"""Defaults of every test: a backend, quiet logs and a fixed seed."""

import gc
import os
import zlib
from collections import defaultdict

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis  # noqa: E402
import keras  # noqa: E402
import pytest  # noqa: E402

BACKEND = keras.backend.backend()
OTHER_BACKENDS = {"_tensorflow", "_jax", "_torch"} - {f"_{BACKEND}"}

# By day the cases are the same each time, at night they are new ones: `make nightly`.
hypothesis.settings.register_profile(
    "keras_lso", deadline=None, max_examples=20, derandomize=True, database=None
)
hypothesis.settings.register_profile(
    "nightly", deadline=None, max_examples=200, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "keras_lso"))


def pytest_report_header():
    return f"keras: {keras.__version__}, backend: {BACKEND}"


def pytest_ignore_collect(collection_path, config):
    """Keep `--doctest-modules` from importing what it must not.

    That is the modules of the other backends, and the worker scripts that stand
    beside the tests.
    """
    if collection_path.suffix != ".py":
        return None
    folder = collection_path.relative_to(config.rootpath).parts[0]
    if folder == "keras_lso":
        ignore = collection_path.stem in OTHER_BACKENDS
    else:
        ignore = not collection_path.name.startswith("test_")
    return True if ignore else None


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run the tests marked `exhaustive` with every combination of arguments",
    )


def pytest_collection_modifyitems(config, items):
    """Leave out combinations of a test that is marked `exhaustive`.

    Those left have each value of each argument in one of them at least. Each test
    begins elsewhere in its list, so that together they see more of the pairs.
    """
    if config.getoption("exhaustive"):
        return
    combinations = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") and hasattr(item, "callspec"):
            combinations[item.parent.nodeid, item.originalname].append(item)
    left_out = set()
    for (_, name), alike in combinations.items():
        start = zlib.crc32(name.encode()) % len(alike)
        left_out.update(set(alike) - _covering(alike[start:] + alike[:start]))
    config.hook.pytest_deselected(items=[i for i in items if i in left_out])
    items[:] = [item for item in items if item not in left_out]


def _covering(items):
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


def pytest_collection_finish():
    """Leave what has been imported, which stays, out of Python's garbage collection.

    A framework is a million objects: looking through them took 7% of a run.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)
