"""`NovoGrad` does what OpenSeq2Seq's formula and optax's code do, scaled or not.

On the same gradients: see `layer_references.py`.
"""

import keras
import numpy as np
import pytest

from integration_tests.layer_references import (
    STEPS,
    assert_as_recorded,
    assert_same,
    by_optax,
    make_gradients,
    make_start,
    trajectory,
)
from keras_lso import LossScaleOptimizer, NovoGrad

# At its first step no norm may be 0: without epsilon optax would divide by it.
PROBLEM = {
    "shapes": {"kernel": (3, 3, 2, 4), "bias": (4,), "dense": (4, 3), "scale": ()},
    "zero_at": 1,
}


def open_seq2seq(rates, beta1, beta2, epsilon, weight_decay, grad_averaging):
    """OpenSeq2Seq's optimizers/novograd.py around TF1's momentum, in float64."""
    start = make_start(PROBLEM["shapes"])
    weights = {name: value.astype("float64") for name, value in start.items()}
    emas, momentums = dict.fromkeys(start, 0.0), dict.fromkeys(start, 0.0)
    steps = []
    for rate, grads in zip(rates, make_gradients(**PROBLEM), strict=True):
        for name, w in weights.items():
            g, ema = grads[name].astype("float64"), emas[name]
            g_2 = np.sum(g**2)
            emas[name] = g_2 if ema == 0 else ema * beta2 + g_2 * (1 - beta2)
            g = g / np.sqrt(emas[name] + epsilon)
            if weight_decay > 0:
                g = g + weight_decay * w
            if grad_averaging:
                g = g * (1 - beta1)
            momentums[name] = beta1 * momentums[name] + g
            weights[name] = w - rate * momentums[name]
        steps.append(list(weights.values()))
    return steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrap", [lambda o: o, LossScaleOptimizer], ids=["", "scaled"])
@pytest.mark.parametrize("averaging", [False, True], ids=["", "averaged"])
@pytest.mark.parametrize("decay", [0.0, 0.02])
def test_novograd_matches_open_seq2seq_formula(decay, averaging, wrap, assert_close):
    rates = [0.02 * (1 - step / 60) ** 2 for step in range(STEPS)]
    ours = NovoGrad(
        keras.optimizers.schedules.PolynomialDecay(0.02, 60, 0.0, power=2.0),
        weight_decay_rate=decay,
        grad_averaging=averaging,
    )
    theirs = open_seq2seq(rates, 0.95, 0.98, 1e-8, decay, averaging)
    assert_same(trajectory(wrap(ours), **PROBLEM), theirs, assert_close)


@pytest.mark.parametrize("decay", [pytest.param(0.0, marks=pytest.mark.full), 0.02])
def test_novograd_without_epsilon_matches_optax(decay, original, assert_close):
    ours = NovoGrad(0.02, beta_1=0.9, beta_2=0.75, epsilon=0.0, weight_decay_rate=decay)
    theirs = by_optax(
        "novograd", 0.02, b1=0.9, b2=0.75, eps=0.0, weight_decay=decay, **PROBLEM
    )
    ours = trajectory(ours, **PROBLEM)
    assert_as_recorded(ours, original(theirs), assert_close)
