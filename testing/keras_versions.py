"""What the Keras at hand can do, by which tests choose."""

import pytest

from keras_lso._keras_internals.keras_version import excludes_before_build_alone

# Keras 3.16 decides in `build` which variables decay.
excludes_after_build = not excludes_before_build_alone()
excluded_before_build = pytest.mark.skipif(
    not excludes_after_build, reason="Keras takes exclusions before `build` alone"
)
