"""NumPy and OpenVINO, under which a model can be loaded but not trained."""

from collections.abc import Callable
from typing import Any

import keras

from keras_lso._backend import autodiff

AVERAGES_IN_STEP = False
HOW_TO_START = f"The Keras backend {keras.backend.backend()!r} has no processes."

trained_variables: Callable[..., list[keras.Variable]] = autodiff.trained_variables


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the step: there is no compiler."""
    return step


def count_processes() -> int | None:
    """Returns None: there are no processes."""
    return None
