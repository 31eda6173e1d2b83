"""Fails a test that is marked `one_backend` if the code of a backend runs in it.

These are the files in the backend's folder in `keras_lso/_backend/`, and its file in
`keras_lso/compat/backend/`, which the other backends never import. Keras's own work on
its backends, such as making a variable, is not tested here.
"""

import contextlib
import pathlib
import sys

import keras
import pytest

import keras_lso

PACKAGE = pathlib.Path(keras_lso.__file__).parent
BACKEND = keras.backend.backend()
OWN = PACKAGE / "_backend" / BACKEND, PACKAGE / "compat" / "backend" / f"{BACKEND}.py"


def is_of_a_backend(filename):
    """Whether a file is imported under this backend only."""
    return any(map(pathlib.Path(filename).is_relative_to, OWN))


@contextlib.contextmanager
def calls_of_a_backend():
    """Yields a set of the calls of the backend's functions, as they happen in it."""
    found: set = set()
    known: dict = {}

    def look(frame, event, argument):
        code = frame.f_code
        if event != "call":
            return
        if code not in known:
            known[code] = is_of_a_backend(code.co_filename)
        if known[code]:
            found.add(f"{pathlib.Path(code.co_filename).name}: {code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not item.get_closest_marker("one_backend"):
        return (yield)
    with calls_of_a_backend() as found:
        result = yield
    assert not found, (
        f"{item.nodeid} is marked `one_backend`, but calls {sorted(found)}, which "
        "differ between backends. Remove the mark."
    )
    return result
