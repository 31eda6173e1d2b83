"""Defaults of every test: a backend, quiet logs and a fixed seed."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import pytest  # noqa: E402

BACKEND = keras.backend.backend()
OTHER_BACKENDS = {"_tensorflow", "_jax", "_torch"} - {f"_{BACKEND}"}


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


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)
