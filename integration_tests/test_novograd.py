"""`NovoGrad` does what optax's code does.

On the same gradients: see `layer_references.py`.
"""

import pytest

from integration_tests.layer_references import assert_as_recorded, by_optax, trajectory
from keras_lso import NovoGrad

# At its first step no norm may be 0: without epsilon optax would divide by it.
PROBLEM = {
    "shapes": {"kernel": (3, 3, 2, 4), "bias": (4,), "dense": (4, 3), "scale": ()},
    "zero_at": 1,
}


@pytest.mark.parametrize("decay", [pytest.param(0.0, marks=pytest.mark.full), 0.02])
def test_novograd_without_epsilon_matches_optax(decay, original, assert_close):
    ours = NovoGrad(0.02, beta_1=0.9, beta_2=0.75, epsilon=0.0, weight_decay_rate=decay)
    theirs = by_optax(
        "novograd", 0.02, b1=0.9, b2=0.75, eps=0.0, weight_decay=decay, **PROBLEM
    )
    ours = trajectory(ours, **PROBLEM)
    assert_as_recorded(ours, original(theirs), assert_close)
