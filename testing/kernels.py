"""The steps without any fast path."""

import contextlib

import pytest

from keras_lso._backend import backend, without_kernels


@contextlib.contextmanager
def off():
    """Has the effect of `KERAS_LSO_KERNELS=generic` at the import of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "__class__", without_kernels(type(backend)))
        yield
