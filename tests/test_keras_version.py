"""The errors and warnings of an import with a Keras that was not tested."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tomllib
import warnings

import keras
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from keras_lso._keras_internals import keras_version
from testing import forked
from testing.pins import pins_of

ROOT = pathlib.Path(__file__).parents[1]
INSTALL = '`pip install "keras>=3.12,<3.16"`'


def run(code, backend="numpy"):
    # Every warning is shown, also those of the backend.
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_supported_versions_match_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["dependencies"])
    specifiers = {each.name: each.specifier for each in requirements}
    assert specifiers["keras"] == keras_version.SUPPORTED


@pytest.mark.parametrize(
    "version, supported, newer",
    [
        ("3.12.0", True, False),
        ("3.15.99.post1", True, False),
        ("3.14.0.dev2026", True, False),
        ("2.15.0", False, False),
        ("3.11.3", False, False),
        ("3.12.0rc1", False, False),
        ("3.16.0.dev2026", True, True),
        ("4.0.0", True, True),
    ],
)
def test_versions_are_classified_as_supported_or_newer(version, supported, newer):
    assert keras_version.fits(version, keras_version.SUPPORTED) is supported
    assert keras_version.fits(version, keras_version.TESTED) is not newer


def test_tested_version_matches_pins():
    newest = Version(pins_of("dev")["keras"])
    assert f"<{newest.major}.{newest.minor + 1}" == keras_version.TESTED


# A module in place of Keras that lacks names that we import, as old versions do.
KERAS_OF_ANOTHER_VERSION = """
import runpy, sys, types
keras = sys.modules["keras"] = types.ModuleType("keras")
keras.__version__ = {version!r}
keras.__file__ = "/somewhere/keras/__init__.py"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "version, statement",
    [
        ("3.11.3", "import keras_lso.compat.v1"),
        ("3.0.0", "runpy.run_module('keras_lso', run_name='__main__')"),
    ],
)
def test_import_rejects_keras_older_than_supported(version, statement):
    result = run(KERAS_OF_ANOTHER_VERSION.format(version=version) + statement)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: keras_lso supports Keras >=3.12. Found: Keras {version} "
        f"(/somewhere/keras/__init__.py). Run {INSTALL}."
    )


@pytest.mark.parametrize(
    "version, error, words",
    [
        ("2.15.0", ImportError, "Found: Keras 2.15.0. Run `pip"),
        (
            keras.__version__,
            ImportError,
            "no_such_framework.*Set the environment variable",
        ),
        ("3.99.0", ImportError, "no_such_framework.*Set the environment variable"),
    ],
)
def test_keras_that_fails_in_its_own_imports_is_named_if_it_is_old(
    version, error, words, monkeypatch, tmp_path
):
    (tmp_path / "keras.py").write_text("import no_such_framework")
    metadata = tmp_path / f"keras-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: keras\nVersion: {version}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras")
    with pytest.raises(error, match=words):
        keras_version.check_keras()


def test_missing_keras_raises_module_not_found_error(monkeypatch):
    def no_metadata(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.setattr(importlib.metadata, "version", no_metadata)
    with pytest.raises(ModuleNotFoundError, match="import of keras halted"):
        keras_version.check_keras()


NEWER = """
import warnings
import keras
keras.__version__ = "3.99.0"
"""
IMPORTS = """
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    import keras_lso, keras_lso.compat.v1, keras_lso.compat.saving
    import keras_lso
for warning in shown:
    if "keras_lso" in str(warning.message):
        print(warning.category.__name__, warning.filename, warning.message)
optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.5))
print(optimizer.inner_optimizer.name, float(optimizer.initial_scale))
"""


@pytest.mark.slow
def test_newer_keras_triggers_one_warning_and_works():
    result = forked.run(NEWER + IMPORTS, "numpy")
    assert result.returncode == 0, result.stderr
    warned, works = result.stdout.splitlines()
    # In the line of the user's import, and not in the package.
    assert warned == (
        "UserWarning <string> keras_lso was tested with Keras >=3.12,<3.16. Found: "
        "Keras 3.99.0, which is newer, and has the private names that keras_lso uses, "
        "but they may do something else. Look for a newer keras_lso, `pip install "
        f"--upgrade keras-lso`, or run {INSTALL}."
    )
    # The check has made no optimizer, which would change the number in the name.
    # Keras 3.12 writes the name in capitals.
    assert works.lower() == f"sgd {2.0**15}"


def test_error_lists_all_missing_private_names(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    gone = "keras.optimizers.Optimizer._gone", "keras.src.gone._too"
    names = keras_version.PRIVATE_NAMES
    monkeypatch.setattr(keras_version, "PRIVATE_NAMES", (gone[0], *names, gone[1]))
    with pytest.raises(ImportError, match=f"uses: {gone[0]}; {gone[1]}. Run"):
        keras_version.check_keras()


def test_all_private_names_exist_and_tested_keras_is_not_probed(monkeypatch):
    names = keras_version.PRIVATE_NAMES
    assert [name for name in names if not keras_version._exists(name)] == []
    monkeypatch.setattr(keras, "__version__", "3.15.9")
    monkeypatch.setattr(keras_version, "PRIVATE_NAMES", ("keras.gone",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_version.check_keras()
