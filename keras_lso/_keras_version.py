"""Refuses a version of Keras that the package was not made for, when imported.

`keras_lso` imports this before anything else of its own: what it takes from Keras
moves between versions, and would be missed at some import, or in some step, with no
word of the version.
"""

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

# As in pyproject.toml, whose metadata is not there in a checkout. A test compares them.
SUPPORTED = ">=3.12,<3.16"


def is_supported(version):
    """Whether the package was made for this version of Keras.

    A development version or a release candidate counts as what it leads to, but for
    the first version that is too new: 3.16.0rc0 is too new as well.

    Args:
        version: String.

    Returns:
        Bool.
    """
    try:
        return SpecifierSet(SUPPORTED).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def check_keras():
    """Imports Keras, and refuses it if it is too old or too new.

    Raises:
        ImportError: If this version of Keras is not supported. (If there is no Keras,
            it is Python's own.)
    """
    try:
        import keras
    except Exception as error:
        # An old Keras fails in its own imports beside a new framework: then the
        # version is what is wrong, and only the metadata can tell.
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
