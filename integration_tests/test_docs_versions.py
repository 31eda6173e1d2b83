"""docs/compatibility.md says which versions were tested: those that are pinned."""

import pathlib
import re
import tomllib

import pytest
from packaging.requirements import Requirement

from integration_tests.docs_blocks import PAGES, table_of
from keras_lso._keras_internals import keras_version
from testing import pins

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The columns of the table, and what the packages are called in requirements/.
PACKAGES = {
    "Keras": "keras",
    "TensorFlow": "tensorflow-cpu",
    "JAX": "jax",
    "PyTorch": "torch",
    "NumPy": "numpy",
}
COLUMNS = ("Python", *PACKAGES, "status", "tests and versions")


def rows():
    """Returns the rows of the table, as dicts of column names to cells."""
    cells = table_of("docs/compatibility.md", "Python")
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells]


def pins_of(row):
    """Returns the versions in the file that a row names, None if it names none."""
    named = re.search(r"`requirements/(\w+)\.txt`", row["tests and versions"])
    if named is None:
        return None
    return pins.pins_of(named[1])


def test_version_table_matches_pins_in_named_files():
    of_files = [(row, pins_of(row)) for row in rows()]
    of_files = [(row, pinned) for row, pinned in of_files if pinned]
    assert len(of_files) >= 2
    for row, pinned in of_files:
        assert row["status"] in ("tested", "works")
        versions = {column: pinned.get(name, "-") for column, name in PACKAGES.items()}
        assert {column: row[column] for column in PACKAGES} == versions


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/compatibility.md"]
)
def test_pages_state_tested_range_of_keras_versions(page):
    [keras] = [
        r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "keras"
    ]
    oldest = str(keras.specifier).removeprefix(">=")
    major, minor = keras_version.TESTED.removeprefix("<").split(".")
    text = PAGES[page].read_text()
    assert f"Keras {oldest} to {major}.{int(minor) - 1}" in text
    # README.md links to the built site.
    assert re.search(r"compatibility\.(md|html)", text) or "compatibility" in page
