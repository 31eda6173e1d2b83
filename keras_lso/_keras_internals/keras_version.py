"""The versions that the package was made for and tested with, checked on import.

This module is separate because `keras_lso` imports it first. Private attributes of
Keras move between versions. Without this check, an import or a step would fail with an
error that does not name the version.
"""

import importlib.metadata
import sys
import warnings

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from keras_lso._keras_internals.private_names import of_frameworks, of_keras
from keras_lso._keras_internals.private_names.probes import missing, of_backend

# As in pyproject.toml, whose metadata a checkout lacks. A test compares the two.
SUPPORTED = ">=3.12"
# Below the first versions with which the tests have not passed. A test compares
# them with requirements/.
TESTED = {"keras": "<3.16", "tensorflow": "<2.22", "jax": "<0.13", "torch": "<2.16"}


def is_supported(version):
    """Whether the package was made for this version of Keras, a string.

    A development version or a release candidate counts as its release. A version that
    is newer than those that were tested is supported if its private attributes are
    where the package looks for them.
    """
    return _contains(SUPPORTED, version)


def is_newer_than_tested(package, version):
    """Whether a package's version, a string, is newer than those that were tested.

    A candidate of the first release that is too new, such as 3.16.0rc0, is too new as
    well.
    """
    return not _contains(TESTED[package], version)


def _contains(specifiers, version):
    try:
        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def excludes_before_build_alone():
    """Whether an optimizer takes exclusions from weight decay only before `build`.

    In Keras 3.16 `build` decides which variables decay.
    """
    import keras

    return not _contains("<3.16", keras.__version__)


def assigns_by_layout():
    """Whether a variable that holds a shard lays out assigned values by its layout.

    Keras 3.16 does, and fails without a layout.
    """
    import keras

    return not _contains("<3.16", keras.__version__)


def check_keras():
    """Imports Keras, rejects it if it is too old, and probes it if it is too new.

    Warns:
        UserWarning: If this version of Keras is newer than those that were tested.

    Raises:
        ImportError: If Keras is missing, or its version is not supported, or it lacks
            private attributes that the package uses.
    """
    try:
        import keras
    except Exception as error:
        # An old Keras with a new framework fails in its own imports. The cause is
        # then its version, which only the metadata can tell.
        version = _installed_version()
        if version is None or is_supported(version):
            raise
        raise ImportError(_message(version)) from error
    version = keras.__version__
    if not is_supported(version):
        raise ImportError(_message(version, keras.__file__))
    if is_newer_than_tested("keras", version):
        probes = of_backend(of_keras.PROBES, keras.backend.backend())
        _refuse_what_lacks(probes, "Keras", version, _pip_install_keras())
        # The line that imports the package, past this module and `keras_lso` itself.
        warnings.warn(_warning(version, len(probes)), stacklevel=4)


def check_framework():
    """Probes the framework below Keras if it is newer than those that were tested.

    If nothing is missing, there is no warning. The package uses few functions of a
    framework, and Keras, which is in between, does not change them.

    Raises:
        ImportError: If the framework lacks private functions that the package uses.
    """
    import keras

    name = keras.backend.backend()
    version = getattr(sys.modules.get(name), "__version__", None)
    if name in TESTED and version and is_newer_than_tested(name, version):
        probes = of_backend(of_frameworks.PROBES, name)
        _refuse_what_lacks(probes, name, version, f'pip install "{name}{TESTED[name]}"')


def _refuse_what_lacks(probes, name, version, command):
    lacking = missing(probes)
    if lacking:
        raise ImportError(
            f"{name} {version} is newer than the versions that keras_lso was tested "
            "with, and lacks private attributes that keras_lso uses: "
            f"{'; '.join(map(str, lacking))}. Run `{command}`, or look for a keras_lso "
            f"that supports {name} {version}: `pip install --upgrade keras-lso`."
        )


def _installed_version():
    try:
        return importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip_install_keras():
    return f'pip install "keras{SUPPORTED},{TESTED["keras"]}"'


def _message(version, file=None):
    where = f" ({file})" if file else ""
    return (
        f"keras_lso supports Keras {SUPPORTED}. Found: Keras {version}{where}. "
        f"Run `{_pip_install_keras()}`."
    )


def _warning(version, count):
    return (
        f"keras_lso was tested with Keras {SUPPORTED},{TESTED['keras']}. Found: Keras "
        f"{version}, which is newer. Checked: the {count} private attributes of Keras "
        "that keras_lso uses are all there. Not checked: what they do. Look for a "
        f"keras_lso that was tested with Keras {version}, `pip install --upgrade "
        f"keras-lso`, or run `{_pip_install_keras()}`."
    )


check_keras()
check_framework()
