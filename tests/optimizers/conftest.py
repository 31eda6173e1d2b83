"""An optimizer with and without loss scaling, and the weights that it trains."""

import numpy as np
import pytest

from testing.layer_wise import SHAPES
from testing.optimizer_steps import in_loss_scale_optimizer


@pytest.fixture(params=["alone", "in a LossScaleOptimizer"])
def wrap(request):
    """Wraps an optimizer, or does not."""
    return in_loss_scale_optimizer if request.param != "alone" else lambda o: o


@pytest.fixture
def start():
    """The weights at first, of which one is zeros."""
    random = np.random.default_rng(1)
    values = [random.standard_normal(s).astype("float32") for s in SHAPES]
    values[2] = np.zeros_like(values[2])
    return values


@pytest.fixture
def gradients():
    """Of six steps, of several magnitudes; one of them is zeros."""
    random = np.random.default_rng(2)
    sizes = 1e-3, 1.0, 1.0, 1e3, 1.0
    steps = [
        [
            np.asarray(size * random.standard_normal(s), "float32")
            for s, size in zip(SHAPES, sizes, strict=True)
        ]
        for _ in range(6)
    ]
    steps[3][1] = np.zeros_like(steps[3][1])
    return steps
