"""Features of the installed version of Keras, for tests that depend on them."""

import keras
import pytest
from packaging.version import Version

# A development version counts as its release.
_RELEASE = Version(keras.__version__).release[:2]

# From 3.16 on `build` decides which variables decay.
excludes_after_build = _RELEASE < (3, 16)
excluded_before_build = pytest.mark.skipif(
    not excludes_after_build, reason="Keras takes exclusions before `build` alone"
)
# Before 3.16 Keras also read lower-case class names of configs that have a module.
reads_lower_case = _RELEASE < (3, 16)
# Before 3.16 `load_model` left the weights of a `Sequential` out, by its paths.
loads_sequential_of_orbax = _RELEASE >= (3, 16)
# From 3.16 on `steps_per_execution` may be above 1 on PyTorch.
takes_several_steps = _RELEASE >= (3, 16) or keras.backend.backend() != "torch"
# From 3.16 on a training step that PyTorch compiles has its backward pass in the graph.
compiles_backward_pass = _RELEASE >= (3, 16)
# Keras 3.12's Muon reads an attribute that TensorFlow's variables lack. It is left out
# on all backends, whose cases take turns.
takes_muon = _RELEASE > (3, 12)
# From 3.16 on `fit` trains with several processes on PyTorch.
fits_torch_processes = _RELEASE >= (3, 16)
_HAS_MULTI_OPTIMIZER = hasattr(keras.optimizers, "MultiOptimizer")
needs_multi_optimizer = pytest.mark.skipif(
    not _HAS_MULTI_OPTIMIZER, reason="Keras has a MultiOptimizer since 3.15"
)


def multi_optimizer(choice, others=None):
    """Returns a MultiOptimizer, by a function or a default; skips if Keras has none."""
    if not _HAS_MULTI_OPTIMIZER:
        pytest.skip("Keras has a MultiOptimizer since 3.15")
    if others is not None:
        choice = keras.optimizers.OptimizerMap(choice, others)
    return keras.optimizers.MultiOptimizer(choice)


def import_keras_hub():
    """Returns KerasHub; skips the test if it is missing, or older than Keras allows."""
    reason = "KerasHub is not installed, or cannot be imported with this Keras"
    return pytest.importorskip("keras_hub", reason=reason, exc_type=ImportError)
