"""Refuses a version of Keras that the package was not made for, when imported.

It is apart because `keras_lso` imports it first: private attributes of Keras move
between versions, and without this check an import or a step would fail with an error
that does not name the version.
"""

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

# As in pyproject.toml, whose metadata a checkout lacks. A test compares the two.
SUPPORTED = ">=3.12,<3.16"


def is_supported(version):
    """Whether the package was made for this version of Keras, a string.

    A development version or a release candidate counts as its release, except that one
    of the first release that is too new is too new as well: 3.16.0rc0.
    """
    try:
        return SpecifierSet(SUPPORTED).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def check_keras():
    """Imports Keras, and refuses it if it is too old or too new.

    Raises:
        ImportError: If this version of Keras is not supported, or there is none.
    """
    try:
        import keras
    except Exception as error:
        # An old Keras beside a new framework fails in its own imports. The cause is
        # then its version, which only the metadata can tell.
        version = _installed_version()
        if version is None or is_supported(version):
            raise
        raise ImportError(_message(version)) from error
    if not is_supported(keras.__version__):
        raise ImportError(_message(keras.__version__, keras.__file__))


def _installed_version():
    try:
        return importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        return None


def _message(version, file=None):
    where = f" ({file})" if file else ""
    return (
        f"keras_lso supports Keras {SUPPORTED}. Found: Keras {version}{where}. "
        f'Run `pip install "keras{SUPPORTED}"`, or look for a keras_lso that supports '
        f"Keras {version}: `pip install --upgrade keras-lso`."
    )


check_keras()
