"""An optimizer with and without loss scaling, and the weights that `LARS` trains."""

import numpy as np
import pytest

from testing.lars import SHAPES
from testing.optimizer_steps import in_loss_scale_optimizer


@pytest.fixture(params=["alone", "in a LossScaleOptimizer"])
def wrap(request):
    """Wraps an optimizer, or does not."""
    return in_loss_scale_optimizer if request.param != "alone" else lambda o: o


@pytest.fixture
def start():
    """The weights at first, of LARS; the files of other optimizers have their own."""
    random = np.random.default_rng(1)
    return [random.standard_normal(s).astype("float32") for s in SHAPES]


@pytest.fixture
def gradients():
    """Of six steps, for `start`."""
    random = np.random.default_rng(2)
    return [
        [random.standard_normal(s).astype("float32") for s in SHAPES] for _ in range(6)
    ]
