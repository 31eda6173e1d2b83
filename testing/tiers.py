"""Selects the tests of `make test`. `make test-full` gives `--full`, and runs all.

Without a mark a test runs under PyTorch, the quickest backend to import. It has a mark
if another rule holds:

- `each_backend`: under each backend, since what it tests differs between them. The
  same holds for the files and folders in `EACH_BACKEND`, and for a test with a
  `skipif`, which names the backends;
- `exhaustive`: one of many combinations of arguments, of which `make test` runs enough
  to cover each value, and half of these under JAX and TensorFlow if they are many;
  pytest prints how many there are;
- `full`: too slow for every change.

A file or a test that is named on the command line runs under any backend.
"""

import os
import pathlib
import re
import zlib
from collections import Counter, defaultdict

import keras
import pytest

ROOT = pathlib.Path(__file__).parents[1]
BACKEND = keras.backend.backend()
THE_ONE_BACKEND = "torch"
# Which half of many combinations the others run.
HALVES, MANY = {"jax": 0, "tensorflow": 1}, 15
# Primitives, the step, masters, statistics, equivalence with each optimizer, `fit`,
# replicas and processes.
EACH_BACKEND = (
    "tests/_backend/",
    "tests/compat/backend/",
    "tests/_core/test_counters.py",
    "tests/_core/test_gradients",
    "tests/_core/test_inner_update.py",
    "tests/_core/test_master_weights",
    "tests/_core/test_rule_update",
    "tests/_core/test_spikes.py",
    "tests/_core/test_step",
    "tests/optimizers/test_steps.py",
    "tests/test_fast_paths.py",
    "tests/test_keras_internals.py",
    "tests/test_loss_scale_optimizer.py",
    "tests/test_sparse_gradient_parts.py",
    "tests/test_statistics.py",
    "integration_tests/distributed/",
    "integration_tests/test_across_backends.py",
    "integration_tests/test_attack.py",
    "integration_tests/test_custom_loops.py",
    "integration_tests/test_fit.py",
    "integration_tests/test_inner_optimizers.py",
    "integration_tests/test_resume.py",
    "integration_tests/test_spikes_in_fit.py",
    "integration_tests/test_statistics.py",
    "integration_tests/test_survival.py",
)

MARKED = r"mark\.(each_backend|skipif)"

COUNTS = pytest.StashKey[str]()

# The environment variable that passes `--full` to programs that tests start.
VARIABLE = "KERAS_LSO_TESTS"


def full_but_for(quick, values):
    """Returns values for `parametrize`. All except the quick ones have the mark."""
    return [
        pytest.param(value, marks=[] if value in quick else [pytest.mark.full])
        for value in values
    ]


def is_full():
    """Whether this process belongs to tests that were started with `--full`."""
    return os.environ.get(VARIABLE) == "full"


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run every combination and each test under this backend",
    )


def pytest_configure(config):
    os.environ[VARIABLE] = "full" if config.getoption("full") else "default"


def is_of_each_backend(path):
    """Whether all tests in a file run under each backend."""
    return path.relative_to(ROOT).as_posix().startswith(EACH_BACKEND)


def pytest_ignore_collect(collection_path, config):
    """Skips the import of files that have nothing to run under this backend."""
    path = collection_path
    if path.suffix != ".py" or is_full() or BACKEND == THE_ONE_BACKEND:
        return None
    if any(arg.split("::")[0].endswith(path.name) for arg in config.args):
        return None
    if path.is_relative_to(ROOT / "keras_lso"):
        # PyTorch runs the doctests, except those of a backend's code. Without its
        # `__init__.py` pytest would execute a package a second time.
        names = {*path.parts, path.stem}
        return None if names & {BACKEND, "__init__"} else True
    is_here = is_of_each_backend(path) or re.search(MARKED, path.read_text())
    return None if is_here else True


# First: which combinations cover all does not depend on what else is deselected.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out tests for `--full`, unless they were requested by name."""
    if config.getoption("full"):
        return
    combinations = combinations_left_out(items)
    named = {arg.split("[")[0] for arg in config.args if "::" in arg}
    files = {pathlib.Path(arg).name for arg in config.args if arg.endswith(".py")}

    def runs(item):
        if item.nodeid.split("[")[0] in named:
            return True
        if item in combinations or item.get_closest_marker("full"):
            return False
        return (
            BACKEND == THE_ONE_BACKEND
            or item.path.name in files
            or any(map(item.get_closest_marker, ("each_backend", "skipif")))
            or item.path.is_relative_to(ROOT / "keras_lso")
            or is_of_each_backend(item.path)
        )

    left_out = {item for item in items if not runs(item)}
    counts = f"{len(items) - len(left_out)} of {len(items)} tests and combinations"
    config.stash[COUNTS] = f"{counts}; --full runs all"
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_report_collectionfinish(config):
    return config.stash.get(COUNTS, [])


def combinations_left_out(items):
    """Returns the combinations of `exhaustive` tests that may be left out.

    Each test begins at another place in its list, so that together they cover more
    pairs.
    """
    combinations = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") and hasattr(item, "callspec"):
            combinations[item.parent.nodeid, item.originalname].append(item)
    left_out = set()
    for (_, name), alike in combinations.items():
        start = zlib.crc32(name.encode()) % len(alike)
        chosen = covering(alike[start:] + alike[:start])
        is_of_all = not alike[0].get_closest_marker("skipif")
        if BACKEND in HALVES and is_of_all and len(chosen) > MANY:
            chosen = set(sorted(chosen, key=alike.index)[HALVES[BACKEND] :: 2])
        left_out.update(set(alike) - chosen)
    return left_out


def covering(items):
    """Returns a set of items in which each value of each argument occurs.

    Of items with as many new values, it takes the one whose values were taken least
    often: if each optimizer is compiled in one of three ways, no way has them all.
    """
    values = {
        item: {(name, id(value)) for name, value in item.callspec.params.items()}
        for item in items
    }
    chosen, taken = set(), Counter()
    while missing := set().union(*values.values()) - taken.keys():
        best = max(
            items,
            key=lambda item: (
                len(values[item] & missing),
                -sum(taken[value] for value in values[item]),
            ),
        )
        chosen.add(best)
        taken.update(values[best])
    return chosen
