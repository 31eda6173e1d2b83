"""The versions of Keras that the package was made for and tested with."""

import contextlib
import importlib.metadata
import importlib.util
import pkgutil
import warnings

from packaging.specifiers import SpecifierSet

# As in pyproject.toml, whose metadata a checkout lacks. A test compares the two.
SUPPORTED = ">=3.12"
# Below the first version that is not tested. A test compares it with requirements/.
TESTED = "<3.16"

# The private names that can be looked up without making an object.
PRIVATE_NAMES = (
    "keras.optimizers.Optimizer._backend_update_step",
    "keras.optimizers.Optimizer._filter_empty_gradients",
    "keras.optimizers.Optimizer._get_variable_index",
    "keras.optimizers.Optimizer._track_variable",
    "keras.optimizers.Optimizer._use_weight_decay",
    "keras.optimizers.Optimizer._var_key",
    "keras.layers.Layer._flatten_layers",
    "keras.Model._symbolic_build",
    "keras.src.backend.common.AutocastScope",
    "keras.src.backend.common.global_state",
    "keras.src.backend.common.stateless_scope.get_stateless_scope",
    "keras.src.backend.common.stateless_scope.in_stateless_scope",
    "keras.src.models.functional.functional_like_constructor",
    "keras.src.saving.serialization_lib.SafeModeScope",
    "keras.src.tree.tree_api.register_tree_node_class",
    "keras.src.utils.naming.to_snake_case",
)

_PIP_INSTALL = f'pip install "keras{SUPPORTED},{TESTED}"'


def fits(version: str, specifiers: str) -> bool:
    """Whether a version, which may be a prerelease, is among those specified."""
    return SpecifierSet(specifiers).contains(version, prereleases=True)


def check_keras() -> None:
    """Imports Keras, rejects it if it is too old, and probes it if it is too new."""
    try:
        import keras
    except Exception as error:
        # An old Keras with a new framework fails in its own imports. The cause is
        # then its version, which only the metadata can tell.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("keras")
            if not fits(version, SUPPORTED):
                raise ImportError(_message(version)) from error
        if isinstance(error, ModuleNotFoundError) and error.name == "keras":
            raise
        names = "jax", "tensorflow", "torch"
        installed = [name for name in names if importlib.util.find_spec(name)]
        raise ImportError(
            f"Keras cannot be imported ({type(error).__name__}: {error}). Set the "
            "environment variable KERAS_BACKEND to a backend that is installed: "
            f"{', '.join(installed) or 'none of jax, tensorflow and torch'}."
        ) from error
    version = keras.__version__
    if not fits(version, SUPPORTED):
        raise ImportError(_message(f"{version} ({keras.__file__})"))
    if fits(version, TESTED):
        return
    lacking = [name for name in PRIVATE_NAMES if not _exists(name)]
    if lacking:
        raise ImportError(
            f"Keras {version} is newer than the versions that keras_lso was tested "
            "with, and lacks private attributes that keras_lso uses: "
            f"{'; '.join(lacking)}. Run `{_PIP_INSTALL}`, or look for a newer "
            "keras_lso: `pip install --upgrade keras-lso`."
        )
    # The line that imports the package, past this module and `keras_lso` itself.
    warnings.warn(
        f"keras_lso was tested with Keras {SUPPORTED},{TESTED}. Found: Keras "
        f"{version}, which is newer, and has the private names that keras_lso uses, "
        "but they may do something else. Look for a newer keras_lso, `pip install "
        f"--upgrade keras-lso`, or run `{_PIP_INSTALL}`.",
        stacklevel=4,
    )


def _exists(name: str) -> bool:
    """Whether a dotted name can be looked up."""
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False


def _message(version: str) -> str:
    """Returns the error for a version of Keras that is too old."""
    return (
        f"keras_lso supports Keras {SUPPORTED}. Found: Keras {version}. "
        f"Run `{_PIP_INSTALL}`."
    )


check_keras()
