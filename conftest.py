"""Defaults of every test: a backend, quiet logs and a fixed seed."""

import gc
import importlib.metadata
import os
import pathlib
import random


def keeps_programs():
    """Whether JAX may keep what it compiles.

    On a CPU JAX 0.5 crashes with a program that it has kept, or computes another thing.
    """
    try:
        return not importlib.metadata.version("jax").startswith("0.5.")
    except importlib.metadata.PackageNotFoundError:
        return True


CACHE = pathlib.Path(__file__).parent / "build" / "jax-cache"
DEFAULTS = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Most of a run under JAX is compiling. What is compiled is kept, for what a test
    # compiles again, for the processes that tests start, and for the next run.
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_ENABLE_COMPILATION_CACHE": str(keeps_programs()).lower(),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)

import hypothesis  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Many tests compare by functions of these, whose asserts are to say what differs.
pytest.register_assert_rewrite("testing", "integration_tests")
pytest_plugins = ("testing.tiers", "testing.originals")

BACKEND = keras.backend.backend()
OTHER_BACKENDS = {"tensorflow", "jax", "torch"} - {BACKEND}

hypothesis.settings.register_profile(
    "keras_lso", deadline=None, max_examples=20, derandomize=True, database=None
)
hypothesis.settings.load_profile("keras_lso")


def pytest_report_header():
    return f"keras: {keras.__version__}, backend: {BACKEND}"


def pytest_ignore_collect(collection_path, config):
    """Keep `--doctest-modules` from importing what it must not.

    That is the modules of the other backends, and the worker scripts that stand beside
    the tests.
    """
    if collection_path.suffix != ".py":
        return None
    folder, *parts = collection_path.relative_to(config.rootpath).parts
    if folder == "keras_lso":
        # `_backend/jax/measure.py`, `compat/backend/jax.py`
        ignore = not OTHER_BACKENDS.isdisjoint([*parts, collection_path.stem])
    else:
        ignore = not collection_path.name.startswith("test_")
    return True if ignore else None


def pytest_collection_finish():
    """Leave what has been imported, which stays, out of Python's garbage collection.

    A framework is a million objects: looking through them took 7% of a run.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True, scope="session")
def fixed_seed_of_the_framework():
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def fixed_seed(fixed_seed_of_the_framework):
    """Seeds what Keras draws its seeds from.

    The framework's own seed is not set before each test: that empties TensorFlow's
    cache of kernels, and each of the next operations has to make its own again.
    """
    random.seed(0)
    np.random.seed(0)
